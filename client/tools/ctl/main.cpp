// epctl: the process. The command line's grammar is in grammar.cpp.
#include "commands.h"
#include "common/build_info.h"
#include "completion.h"
#include "grammar.h"
#include "help.h"
#include "standard_output.h"
#include "usage.h"

#include <fcntl.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>

namespace {

using epd::ctl::Arguments;
using epd::ctl::Exit;
using epd::ctl::Output;
namespace v1 = epd::v1;

constexpr std::uint32_t kCompletionMs = 500;  // a user does not wait longer for a completion

// Empty if the daemon does not answer: then there is nothing to complete.
std::vector<std::string> list_names(const std::string& kind, const std::string& socket) {
  const char* variable = std::getenv("EPD_CONTROL_SOCKET");
  const std::string fallback = variable != nullptr && *variable != '\0' ? variable : Arguments().socket;
  epd::ctl::Connection connection(socket.empty() ? fallback : socket, kCompletionMs);
  std::vector<std::string> names;
  v1::ListDevicesResponse devices;
  v1::ListGroupsResponse groups;
  v1::ListSessionsResponse sessions;
  v1::ListOperationsResponse operations;
  v1::GetConfigResponse config;
  if (kind == "DEVICE" && !connection.call(v1::ListDevicesRequest(), devices)) {
    for (const auto& device : devices.devices()) names.push_back(device.name());
  } else if (kind == "SUBSYSTEM" && !connection.call(v1::ListDevicesRequest(), devices)) {
    names = {"daemon", "control", "membership", "cluster"};
    for (const auto& device : devices.devices()) names.push_back("device/" + device.name());
  } else if (kind == "LIMIT" && !connection.call(v1::GetConfigRequest(), config)) {
    for (const auto& entry : config.entries()) {
      constexpr std::string_view kSection = "limits.";
      if (entry.key().starts_with(kSection)) names.push_back(entry.key().substr(kSection.size()) + "=");
    }
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
Exit answer_completion(const CLI::App& app, int argc, char** argv, Output& output) {
  std::vector<std::string> words(argv + 2, argv + argc);
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  for (const std::string& candidate : epd::ctl::complete(app, words, list_names)) {
    output.out << candidate << '\n';
  }
  return Exit::kOk;
}

// What a descriptor for a standard stream that is closed would otherwise become: a socket to the daemon, into
// which the answer is written. These can be opened, and neither read nor written.
void fill_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

void write_text(const Arguments& arguments, Output& output, const std::string& text) {
  if (arguments.json) {
    epd::ctl::write_json(output, {{"text", text}});
  } else {
    output.out << text;
  }
}

// Of --help and --version too, which CLI11 calls errors.
Exit answer(const CLI::App& app, const CLI::ParseError& error, const Arguments& arguments, Output& output) {
  std::ostringstream text;
  std::ostringstream complaint;
  if (app.exit(error, text, complaint) == 0) {
    write_text(arguments, output, text.str());
    return Exit::kOk;
  }
  const std::string message = epd::ctl::usage_message(app, error);
  if (arguments.json) return epd::ctl::report(arguments, output, {Exit::kUsage, "INVALID_ARGUMENT", message});
  output.error << "epctl: " << message << "\nRun with --help for more information.\n";
  return Exit::kUsage;
}

Exit run(int argc, char** argv, Output& output) {
  Arguments arguments;
  CLI::App app(epd::ctl::help::kProgram, "epctl");
  app.set_version_flag("-V,--version", epd::version_text("epctl"));
  build_grammar(app, arguments);
  if (argc > 1 && std::string_view(argv[1]) == "complete") return answer_completion(app, argc, argv, output);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    arguments.json = epd::ctl::wants_json(argc, argv);
    return answer(app, error, arguments, output);
  }
  if (arguments.command == epd::ctl::Command::kCompletion) {
    write_text(arguments, output, epd::ctl::completion_script(arguments.shell));
    return Exit::kOk;
  }
  if (const char* attach = std::getenv("EPD_SOCKET"); attach != nullptr) arguments.attach_socket = attach;
  return epd::ctl::run(arguments, output);
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_streams();
  ::signal(SIGPIPE, SIG_DFL);  // epctl ... | head
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  const bool colour = terminal && std::getenv("NO_COLOR") == nullptr;
  epd::ctl::StandardOutput standard;
  Output output{standard.stream(), std::cerr, colour, terminal};
  const Exit exit = run(argc, argv, output);
  const int error = standard.finish();
  if (error == 0) return static_cast<int>(exit);
  std::cerr << "epctl: standard output took not all of the answer: " << std::strerror(error) << '\n';
  return static_cast<int>(exit == Exit::kOk ? Exit::kUnwritten : exit);
}
