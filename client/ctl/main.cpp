// epctl: the command line's grammar. The only file that sees CLI11.
#include "arguments.h"
#include "commands.h"
#include "help.h"

#include <unistd.h>
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>

namespace {

using epd::ctl::Arguments;
using epd::ctl::Command;
namespace help = epd::ctl::help;

constexpr std::uint32_t kMaxTimeoutMs = 600'000;
constexpr std::uint32_t kMaxDrainMs = 86'400'000;

CLI::App* add_command(CLI::App& app, Arguments& arguments, const char* name, Command command,
                      const help::Page& page) {
  CLI::App* sub = app.add_subcommand(name, page.summary);
  sub->footer(page.text);
  sub->fallthrough();  // global options are fine after the command too
  sub->callback([&arguments, command] { arguments.command = command; });
  return sub;
}

void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("--socket", arguments.socket, "Control socket of the daemon")
      ->envname("EPD_CONTROL_SOCKET")
      ->type_name("PATH")
      ->check([](const std::string& path) { return path.empty() ? "is empty; allowed: a path" : ""; })
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "One JSON document instead of text");
  app.add_option("--timeout-ms", arguments.timeout_ms, "How long to wait for each answer, 1..600000")
      ->type_name("MS")
      ->check(CLI::Range(std::uint32_t{1}, kMaxTimeoutMs))
      ->capture_default_str();
}

void add_commands(CLI::App& app, Arguments& arguments) {
  add_command(app, arguments, "status", Command::kStatus, help::kStatus);
  add_command(app, arguments, "devices", Command::kDevices, help::kDevices);
  add_command(app, arguments, "sessions", Command::kSessions, help::kSessions);
  CLI::App* groups = add_command(app, arguments, "groups", Command::kGroups, help::kGroups);
  groups->add_flag("--members", arguments.members, "List the members of each group too");
  add_command(app, arguments, "ops", Command::kOps, help::kOps);
  add_command(app, arguments, "config", Command::kConfig, help::kConfig);
  CLI::App* drain = add_command(app, arguments, "drain", Command::kDrain, help::kDrain);
  drain
      ->add_option("--timeout-ms", arguments.drain_ms,
                   "Time for sessions to end by themselves, 1..86400000; default: as configured")
      ->type_name("MS")
      ->check(CLI::Range(std::uint32_t{1}, kMaxDrainMs));
  drain->add_flag("--wait", arguments.wait, "Return when the daemon has gone");
  CLI::App* doctor = add_command(app, arguments, "doctor", Command::kDoctor, help::kDoctor);
  doctor->add_flag("--strict", arguments.strict, "Warnings are problems too (exit code 4)");
  add_command(app, arguments, "version", Command::kVersion, help::kVersion);
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGPIPE, SIG_DFL);  // epctl ... | head
  Arguments arguments;
  CLI::App app(help::kProgram, "epctl");
  app.footer(help::kProgramFooter);
  app.set_version_flag("--version", "epctl " EPD_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  add_options(app, arguments);
  add_commands(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(epd::ctl::Exit::kUsage);
  }
  if (const char* attach = std::getenv("EPD_SOCKET"); attach != nullptr && *attach != '\0') {
    arguments.attach_socket = attach;
  }
  const bool colour = ::isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  epd::ctl::Output output{std::cout, std::cerr, colour};
  const epd::ctl::Exit exit = epd::ctl::run(arguments, output);
  std::cout.flush();
  return static_cast<int>(exit);
}
