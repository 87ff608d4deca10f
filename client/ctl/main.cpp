// epctl: the process. The command line's grammar is in grammar.cpp.
#include "commands.h"
#include "completion.h"
#include "grammar.h"
#include "help.h"

#include <unistd.h>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>

namespace {

using epd::ctl::Arguments;
namespace v1 = epd::v1;

constexpr std::uint32_t kCompletionMs = 500;  // nobody waits longer for a tab

// Nothing if the daemon does not answer: then there is nothing to complete.
std::vector<std::string> list_names(const std::string& kind, const std::string& socket) {
  const char* variable = std::getenv("EPD_CONTROL_SOCKET");
  const std::string fallback = variable != nullptr && *variable != '\0' ? variable : Arguments().socket;
  epd::ctl::Connection connection(socket.empty() ? fallback : socket, kCompletionMs);
  std::vector<std::string> names;
  v1::ListDevicesResponse devices;
  v1::ListGroupsResponse groups;
  v1::ListSessionsResponse sessions;
  v1::ListOperationsResponse operations;
  if (kind == "DEVICE" && !connection.call(v1::ListDevicesRequest(), devices)) {
    for (const auto& device : devices.devices()) names.push_back(device.name());
  } else if (kind == "GROUP" && !connection.call(v1::ListGroupsRequest(), groups)) {
    for (const auto& group : groups.groups()) names.push_back(group.name());
  } else if (kind == "SESSION" && !connection.call(v1::ListSessionsRequest(), sessions)) {
    for (const auto& session : sessions.sessions()) names.push_back(std::to_string(session.session_id()));
  } else if (kind == "OPERATION" && !connection.call(v1::ListOperationsRequest(), operations)) {
    for (const auto& operation : operations.operations()) names.push_back(operation.id());
  }
  return names;
}

// epctl complete -- WORDS...: what the scripts of `epctl completion` ask. The words are no command line yet.
int answer_completion(const CLI::App& app, int argc, char** argv) {
  std::vector<std::string> words(argv + 2, argv + argc);
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  for (const std::string& candidate : epd::ctl::complete(app, words, list_names)) {
    std::cout << candidate << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGPIPE, SIG_DFL);  // epctl ... | head
  Arguments arguments;
  CLI::App app(epd::ctl::help::kProgram, "epctl");
  app.set_version_flag("--version", "epctl " EPD_VERSION);
  build_grammar(app, arguments);
  if (argc > 1 && std::string_view(argv[1]) == "complete") return answer_completion(app, argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(epd::ctl::Exit::kUsage);
  }
  if (arguments.command == epd::ctl::Command::kCompletion) {
    std::cout << epd::ctl::completion_script(arguments.shell);
    return 0;
  }
  if (const char* attach = std::getenv("EPD_SOCKET"); attach != nullptr && *attach != '\0') {
    arguments.attach_socket = attach;
  }
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const bool colour = terminal && std::getenv("NO_COLOR") == nullptr;
  epd::ctl::Output output{std::cout, std::cerr, colour, terminal};
  const epd::ctl::Exit exit = epd::ctl::run(arguments, output);
  std::cout.flush();
  return static_cast<int>(exit);
}
