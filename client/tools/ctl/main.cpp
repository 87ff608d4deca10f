// epctl: the process. The command line's grammar is in grammar.cpp.
#include "commands.h"
#include "common/build_info.h"
#include "grammar.h"

#include <fcntl.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <cerrno>
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

// The values of a field in each message of the list that `request` asks for. Empty if the daemon does not
// answer: then there is nothing to complete.
template <typename Response>
std::vector<std::string> ask(epd::ctl::Connection& connection, const google::protobuf::Message& request,
                             const char* list, const char* field) {
  Response response;
  std::vector<std::string> values;
  if (connection.try_call(request, response)) return values;
  const epd::ctl::Json document = epd::ctl::to_json(response);
  for (const auto& message : document[list]) {
    const auto& value = message[field];
    values.push_back(value.is_string() ? value.get<std::string>() : value.dump());
  }
  return values;
}

std::vector<std::string> list_names(const std::string& kind, const std::string& socket) {
  const char* variable = std::getenv("EPD_CONTROL_SOCKET");
  const std::string fallback = variable != nullptr && *variable != '\0' ? variable : Arguments().socket;
  epd::ctl::Connection daemon(socket.empty() ? fallback : socket, kCompletionMs);
  if (kind == "GROUP") return ask<v1::ListGroupsResponse>(daemon, v1::ListGroupsRequest(), "groups", "name");
  if (kind == "SESSION")
    return ask<v1::ListSessionsResponse>(daemon, v1::ListSessionsRequest(), "sessions", "session_id");
  if (kind == "OPERATION")
    return ask<v1::ListOperationsResponse>(daemon, v1::ListOperationsRequest(), "operations", "id");
  std::vector<std::string> names;
  if (kind == "LIMIT") {
    constexpr std::string_view kSection = "limits.";
    for (const auto& key : ask<v1::GetConfigResponse>(daemon, v1::GetConfigRequest(), "entries", "key"))
      if (key.starts_with(kSection)) names.push_back(key.substr(kSection.size()) + "=");
    return names;
  }
  const auto devices = ask<v1::ListDevicesResponse>(daemon, v1::ListDevicesRequest(), "devices", "name");
  if (kind == "DEVICE" || devices.empty()) return devices;
  names = {"daemon", "control", "membership", "cluster"};
  for (const std::string& device : devices) names.push_back("device/" + device);
  return names;
}

// Answers `epctl complete -- WORDS...`, which the scripts of `epctl completion` call. The words are no
// command line yet.
Exit answer_completion(const CLI::App& app, int argc, char** argv, Output& output) {
  std::vector<std::string> words(argv + 2, argv + argc);
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  for (const std::string& candidate : epd::ctl::complete(app, words, list_names)) {
    output.out << candidate << '\n';
  }
  return Exit::kOk;
}

// A closed standard stream's descriptor would be given to the next file that is opened: to the socket to the
// daemon, into which the answer would then be written. These can be opened, and neither read nor written.
void fill_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Standard output that remembers the errno of its failure, which a stream forgets. Output after a failure is
// dropped.
class StandardOutput : public std::stringbuf {
 public:
  // The errno of the first write that failed; 0 if none has.
  int error() const { return error_; }
  int sync() override {
    const std::string text = str();
    std::size_t at = 0;
    while (error_ == 0 && at < text.size()) {
      const ssize_t written = ::write(STDOUT_FILENO, text.data() + at, text.size() - at);
      if (written >= 0) at += static_cast<std::size_t>(written);
      if (written < 0 && errno != EINTR) error_ = errno;
    }
    str("");
    return error_ == 0 ? 0 : -1;
  }

 private:
  int error_ = 0;
};

void write_text(const Arguments& arguments, Output& output, const std::string& text) {
  if (arguments.json) {
    epd::ctl::write_json(output, {{"text", text}});
  } else {
    output.out << text;
  }
}

// Answers errors of the command line, and --help and --version, which CLI11 calls errors too.
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
  CLI::App app("", "epctl");
  app.set_version_flag("-V,--version", epd::version_text("epctl"));
  build_grammar(app, arguments);
  if (argc > 1 && std::string_view(argv[1]) == "complete") return answer_completion(app, argc, argv, output);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    arguments.json = epd::ctl::wants_json(argc, argv);
    return answer(app, error, arguments, output);
  }
  if (arguments.command == "completion") {
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
  StandardOutput standard;
  std::ostream out(&standard);
  std::cerr.tie(&out);  // in the order in which they are written
  Output output{out, std::cerr, colour, terminal};
  const Exit exit = run(argc, argv, output);
  out.flush();
  std::cerr.tie(nullptr);
  if (standard.error() == 0) return static_cast<int>(exit);
  std::cerr << "epctl: could not write the whole answer to standard output: "
            << std::strerror(standard.error()) << '\n';
  return static_cast<int>(exit == Exit::kOk ? Exit::kUnwritten : exit);
}
