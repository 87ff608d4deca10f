// The executable: `epd serve`, `epd engine`, `epd check-config`.
#include "base/log.h"
#include "base/thread.h"
#include "common/build_info.h"
#include "control/control_server.h"
#include "engine/engine_main.h"
#include "metrics/metrics_server.h"
#include "supervisor/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace epd {
namespace {

using supervisor::ConfigSources;

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr unsigned kEndSeconds = 5;  // more than the last calls of the control plane take

constexpr const char* kConfigurationGroup = "Configuration";  // of the help

constexpr const char* kDescription =
    "epd, the expert-parallel communication daemon\n\n"
    "One epd runs on each node. It starts an engine process for each device, admits clients that link\n"
    "libepd, and carries out their Mixture-of-Experts dispatch and combine in shared memory.";

constexpr const char* kFooter =
    "CONFIGURATION\n"
    "  Later ones win: built-in defaults, the configuration file, the environment, flags. Every key below "
    "may\n"
    "  stand in the file (TOML: [limits] max_sessions = 8) or be a flag (--limits.max_sessions 8). Unknown "
    "keys\n"
    "  and values that are not allowed are refused by name.\n\n"
    "SIGNALS\n"
    "  SIGTERM, SIGINT  drain: admit nobody, wait for sessions to end (timeouts.drain_ms), end the rest, "
    "exit 0.\n"
    "                   A second one: at once.\n"
    "  SIGHUP           read the configuration again, as epctl reload does. Applied as a whole or, with the "
    "reason in\n"
    "                   the log, not at all; keys marked 'restart' can't change.\n"
    "  SIGUSR1, SIGUSR2 nothing.\n\n"
    "SERVICE MANAGER\n"
    "  Speaks systemd's notify protocol: READY, STATUS, WATCHDOG, RELOADING, STOPPING,\n"
    "  EXTEND_TIMEOUT_USEC.\n\n"
    "EXIT STATUS\n"
    "  0 stopped as asked; 1 could not start; 2 wrong usage or configuration.\n\n"
    "ENVIRONMENT\n"
    "  EPD_CONFIG       configuration file, if --config is not given\n"
    "  NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID, JOURNAL_STREAM   set by the service manager\n\n"
    "FILES\n"
    "  /etc/epd/epd.toml     configuration; may be missing\n"
    "  /run/epd/epd.sock     clients attach here\n"
    "  /run/epd/control.sock gRPC control plane (epctl)\n\n"
    "SEE ALSO\n"
    "  epctl(1), daemon/README.md";

struct ServeFlags {
  std::string config_path;
  bool quiet = false;                         // of check-config
  std::map<std::string, std::string> values;  // key -> value, only those given
};

void add_config_flags(CLI::App& command, ServeFlags& flags) {
  command.add_option("-c,--config", flags.config_path, "Configuration file [/etc/epd/epd.toml]")
      ->type_name("FILE")
      ->group(kConfigurationGroup)
      ->check([](const std::string& path) {
        return path.empty() ? std::string("is empty; allowed: a path") : std::string();
      });
  for (const supervisor::OptionInfo& option : supervisor::config_options()) {
    std::string names = "--" + option.key;
    if (option.key == "daemon.socket") names += ",--socket";
    if (option.key == "daemon.control_socket") names += ",--control-socket";
    if (option.key == "devices.host") names += ",--host-devices";
    if (option.key == "log.level") names += ",--log-level";
    std::string help = option.help + " Default: \"" + option.default_text + "\"; allowed: " + option.allowed +
                       (option.reloadable ? "; reloadable" : "; restart");
    if (!option.environment.empty()) help += "; environment: " + option.environment;
    command
        .add_option_function<std::string>(
            names, [&flags, key = option.key](const std::string& value) { flags.values[key] = value; }, help)
        ->type_name("VALUE")
        ->group(kConfigurationGroup);
  }
}

ConfigSources sources_of(const ServeFlags& flags, const supervisor::Environment& environment) {
  ConfigSources sources;
  sources.path = !flags.config_path.empty()         ? flags.config_path
                 : !environment.config_path.empty() ? environment.config_path
                                                    : supervisor::kDefaultConfigPath;
  sources.path_given = !flags.config_path.empty() || !environment.config_path.empty();
  sources.environment = environment.options;
  sources.flags = flags.values;
  return sources;
}

int fail(int code, const Status& status) {
  print_last_error("epd: " + status.to_string() + "\n");
  return code;
}

constexpr rlim_t kFewestDescriptors = 512;

// Each member of a group costs three descriptors. With too few the daemon would serve, and refuse every
// client.
Status raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max >= kFewestDescriptors) return {};
  return {StatusCode::kResourceExhausted, "RLIMIT_NOFILE is " + std::to_string(limit.rlim_max) +
                                              "; allowed: " + std::to_string(kFewestDescriptors) +
                                              " or more (LimitNOFILE of the service, ulimit -Hn)"};
}

// One that was closed would become something of ours, and be written to as if it were standard error.
void open_standard_descriptors() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);  // NOLINT
  if (fd > STDERR_FILENO) ::close(fd);
}

int serve(const ServeFlags& flags) {
  const supervisor::Environment environment = supervisor::read_environment();
  const ConfigSources sources = sources_of(flags, environment);
  Result<supervisor::Config> config = supervisor::load_config(sources);
  if (!config.ok()) return fail(kExitUsage, config.status());
  log_init("epd", config->log_levels(), config->format(), environment.journal);
  supervisor::Supervisor::block_signals();
  if (Status status = raise_descriptor_limit(); !status.ok()) return fail(kExitFailure, status);

  supervisor::SupervisorOptions options;
  options.config = *config;
  options.sources = sources;
  options.notify_socket = environment.notify_socket;
  options.watchdog_us = environment.watchdog_us;
  Result<std::unique_ptr<supervisor::Supervisor>> supervisor =
      supervisor::Supervisor::create(std::move(options));
  if (!supervisor.ok()) return fail(kExitFailure, supervisor::with_origins(*config, supervisor.status()));
  for (const std::string& warning : supervisor::warnings_of(*config, environment))
    log_event(LogLevel::kWarning, "configuration", {{"warning", warning}});
  const control::ControlOptions control_options{config->control_socket, config->control_socket_mode,
                                                config->control_socket_gid};
  Result<std::unique_ptr<control::ControlServer>> control =
      control::ControlServer::start((*supervisor)->control(), control_options);
  if (!control.ok()) return fail(kExitFailure, supervisor::with_origins(*config, control.status()));
  control::ControlServer* server = control->get();
  std::unique_ptr<metrics::MetricsServer> metrics;
  if (!config->metrics_listen.empty()) {
    Result<std::unique_ptr<metrics::MetricsServer>> started = metrics::MetricsServer::start(
        (*supervisor)->control(), server->times(),
        {config->metrics_listen, config->metrics_max_groups, config->metrics_max_ranks,
         [server](const char* service) { return server->healthy(service); }});
    if (!started.ok()) return fail(kExitFailure, started.status());
    metrics = std::move(*started);
  }
  (*supervisor)->on_serving([server](bool serving) { server->set_serving(serving); });
  const int code = (*supervisor)->run();
  end_within(kEndSeconds, code);  // where threads are scarce, gRPC's end waits for ever
  server->shutdown();
  return code;
}

int check_config(const ServeFlags& flags) {
  const supervisor::Environment environment = supervisor::read_environment();
  Result<supervisor::Config> config = supervisor::load_config(sources_of(flags, environment));
  if (!config.ok()) return fail(kExitUsage, config.status());
  if (flags.quiet) return 0;
  for (const std::string& warning : supervisor::warnings_of(*config, environment))
    print_error("epd: warning: " + warning + "\n");
  std::fputs(supervisor::to_toml(*config).c_str(), stdout);
  return 0;
}

struct EngineFlags {
  engine::EngineOptions options{"", 3, 4, 5, {}};
  std::string log_level = "info";
  std::string log_format = "logfmt";
};

CLI::App* add_engine_command(CLI::App& app, EngineFlags& flags) {
  CLI::App* command = app.add_subcommand("engine", "Serve one device; started by the daemon, not by hand");
  command->add_option("--device", flags.options.device, "host:N or cuda:N")->required();
  command->add_option("--link-fd", flags.options.link_fd, "Socket to the supervisor");
  command->add_option("--page-fd", flags.options.page_fd, "This engine's EnginePage");
  command->add_option("--bell-fd", flags.options.bell_fd, "Eventfd that other engines ring");
  transport::NetworkOptions& network = flags.options.network;
  command->add_option("--network-library", network.library, "UCX, to reach engines of other nodes");
  command->add_option("--network-devices", network.devices, "UCX_NET_DEVICES");
  command->add_option("--network-transports", network.transports, "UCX_TLS");
  command->add_option("--network-batch-bytes", network.batch_bytes);
  command->add_option("--network-window-bytes", network.window_bytes);
  command->add_option("--network-max-bytes", network.max_bytes);
  command->add_option("--network-peer-timeout-ms", network.peer_timeout_ms);
  command
      ->add_option_function<std::string>(
          "--network-check",
          [&network](const std::string& word) { network.check = abi::FarCheck{abi::far_check_of(word)}; })
      ->check([](const std::string& word) {
        return abi::far_check_of(word) != 0 ? "" : "allowed: headers, crc, mac";
      });
  command->add_option("--log-level", flags.log_level);
  command->add_option("--log-format", flags.log_format)->check(CLI::IsMember({"logfmt", "json"}));
  return command;
}

int run_engine(const EngineFlags& flags) {
  ::prctl(PR_SET_NAME, ("epd-" + flags.options.device).c_str());
  log_init("engine " + flags.options.device, parse_log_levels(flags.log_level).value_or(LogLevels()),
           flags.log_format == "json" ? LogFormat::kJson : LogFormat::kLogfmt,
           supervisor::read_environment().journal);
  return engine::engine_main(flags.options);
}

// A mistyped option deserves a better answer than CLI11's.
bool explain_unknown_option(int argc, char** argv) {
  const std::vector<supervisor::OptionInfo> options = supervisor::config_options();
  for (int i = 1; i < argc; ++i) {
    const std::string_view word(argv[i]);
    if (!word.starts_with("--") || word.find('.') == std::string_view::npos) continue;
    const std::string key(word.substr(2, word.find('=') - 2));
    const bool known =
        std::any_of(options.begin(), options.end(), [&](const auto& o) { return o.key == key; });
    if (known) continue;
    fail(kExitUsage, supervisor::unknown_option(key, "the flags"));
    return true;
  }
  return false;
}

// CLI11 prints the subcommand's own flags. The flags of epd itself may come after it, and usually do.
void print_configuration_help(const CLI::App& app) {
  const auto format = std::dynamic_pointer_cast<CLI::Formatter>(app.get_formatter());
  if (format == nullptr) return;
  const std::vector<const CLI::Option*> options =
      app.get_options([](const CLI::Option* option) { return option->get_group() == kConfigurationGroup; });
  std::fputs(format->make_group(kConfigurationGroup, false, options).c_str(), stdout);
}

int run(int argc, char** argv) {
  CLI::App app(kDescription, "epd");
  app.set_version_flag("-V,--version", version_text("epd"));
  app.footer(kFooter);
  app.require_subcommand(0, 1);
  // Given to `epd` itself or after the subcommand: the same flags.
  ServeFlags flags;
  add_config_flags(app, flags);
  app.fallthrough();
  CLI::App* serve_command = app.add_subcommand("serve", "Run the daemon");
  CLI::App* check_command =
      app.add_subcommand("check-config", "Check the configuration, print every option with its origin, exit");
  check_command->add_flag("-q,--quiet", flags.quiet, "Print errors only");
  EngineFlags engine_flags;
  CLI::App* engine_command = add_engine_command(app, engine_flags);
  serve_command->fallthrough();
  check_command->fallthrough();
  engine_command->fallthrough(false);
  // The commands' help does not repeat the program's own footer.
  for (CLI::App* command : {serve_command, check_command, engine_command}) command->footer("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    app.exit(help);
    if (serve_command->parsed() || check_command->parsed()) print_configuration_help(app);
    return 0;
  } catch (const CLI::ExtrasError&) {
    if (!explain_unknown_option(argc, argv)) {
      fail(kExitUsage, invalid_argument("\"" + app.remaining(true).front() +
                                        "\" is not understood; allowed: one command, and the options that "
                                        "epd COMMAND --help lists"));
    }
    return kExitUsage;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (engine_command->parsed()) return run_engine(engine_flags);
  if (check_command->parsed()) return check_config(flags);
  if (serve_command->parsed()) return serve(flags);
  // A daemon is nothing that somebody should get who wanted to see what `epd` is.
  print_error(
      "epd: no command is given; allowed: serve (runs the daemon), check-config. epd --help says more.\n");
  return kExitUsage;
}

}  // namespace
}  // namespace epd

int main(int argc, char** argv) {
  epd::open_standard_descriptors();
  ::signal(SIGPIPE, SIG_IGN);  // a reader that goes away is an error of a write, not our end
  ::signal(SIGXFSZ, SIG_IGN);  // a file at RLIMIT_FSIZE is one, too
  for (const int signal : {SIGUSR1, SIGUSR2}) ::signal(signal, SIG_IGN);  // log rotation sends them to many
  int code = epd::kExitFailure;
  try {
    code = epd::run(argc, argv);
  } catch (const std::exception& error) {
    epd::print_last_error(std::string("epd: INTERNAL: ") + error.what() + "\n");
  } catch (...) {
    epd::print_last_error("epd: INTERNAL: something was thrown that is no error\n");
  }
  epd::log_flush();
  return code;
}
