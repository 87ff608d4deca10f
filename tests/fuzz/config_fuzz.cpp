// Configuration: whatever a file, the environment and the flags say, the loader answers with a Config that
// keeps its promises or with a refusal that says why. Input: the file's text; after a line "#!flags" or
// "#!environment" come lines key=value.

#include "fuzz.h"
#include "supervisor/config.h"

#include <sys/mman.h>
#include <unistd.h>
#include <sstream>

namespace epd::test {
namespace {

using supervisor::Config;

struct Sources {
  std::string text;
  supervisor::ConfigSources sources;
};

Sources parse(const std::string& input) {
  Sources result;
  std::map<std::string, std::string>* target = nullptr;
  std::istringstream lines(input);
  for (std::string line; std::getline(lines, line);) {
    if (line == "#!flags") {
      target = &result.sources.flags;
    } else if (line == "#!environment") {
      target = &result.sources.environment;
    } else if (target == nullptr) {
      result.text += line + "\n";
    } else {
      const std::size_t equals = line.find('=');
      (*target)[line.substr(0, equals)] = equals == std::string::npos ? "" : line.substr(equals + 1);
    }
  }
  return result;
}

void check_refusal(const Status& status) {
  require(status.code() == StatusCode::kInvalidArgument,
          "a refusal is INVALID_ARGUMENT: " + status.to_string());
  require(!status.message().empty(), "a refusal says why");
}

void check(const Config& config) {
  const std::vector<supervisor::OptionInfo> options = supervisor::config_options();
  require(config.entries.size() == options.size() + config.access.rules().size(),
          "every option and rule is shown");
  const supervisor::GpuList& gpus = config.cuda_devices;
  require(config.host_devices == supervisor::kAutomatic || config.host_devices <= 64,
          "devices.host in its limits");
  require(config.host_devices != 0 || gpus.automatic || !gpus.list.empty(), "there may be a device");
  require(gpus.list.size() <= 64 && (gpus.list.empty() || !gpus.automatic), "devices.cuda in its limits");
  require(config.max_sessions >= 1 && config.max_sessions <= 65536, "limits.max_sessions in its limits");
  require(config.socket_mode <= 0777, "daemon.socket_mode in its limits");
  require(!config.socket.empty() && config.socket != config.control_socket, "two sockets");
  require(config.restart_backoff_min_ms <= config.restart_backoff_max_ms, "pauses in order");
  require(config.effective_sms(abi::DeviceKind::kHost) >= 1 && config.effective_arena_bytes() >= 1,
          "effective values");
  const std::vector<std::uint32_t> gids = {0, 1000};
  for (const std::uint32_t uid : {0u, 1000u, 65534u}) {
    const supervisor::Caller caller{uid, gids};
    const bool attach = config.access.may_attach(caller).ok();
    for (const char* name : {"", "prod-1", "host:0"}) {
      require(attach || !config.access.may_join(caller, name).ok(), "who may not attach may not join");
      require(attach || !config.access.may_use_device(caller, name).ok(), "nor use a device");
    }
    require(config.max_sessions_of(caller).limit >= 1 && config.max_groups_of(caller).limit >= 1, "quotas");
    require(config.max_arena_bytes_of(caller).limit >= 1, "quotas of bytes");
  }
}

void run(const std::string& input) {
  Sources parsed = parse(input);
  static const int file = ::memfd_create("epd.toml", MFD_CLOEXEC);
  require(file >= 0 && ::ftruncate(file, 0) == 0 &&
              ::pwrite(file, parsed.text.data(), parsed.text.size(), 0) ==
                  static_cast<ssize_t>(parsed.text.size()),
          "a file to read from");
  parsed.sources.path = "/proc/self/fd/" + std::to_string(file);
  parsed.sources.path_given = true;
  const Result<Config> config = supervisor::load_config(parsed.sources);
  if (!config.ok()) return check_refusal(config.status());
  check(config.value());
  // The same again changes nothing, whatever a running daemon had before it either is applied or refused.
  const Result<Config> again = supervisor::reload_config(config.value(), parsed.sources);
  require(again.ok(), "the same sources again are no change: " + again.status().to_string());
  static const Config other = supervisor::load_config({}).value();
  const Result<Config> changed = supervisor::reload_config(other, parsed.sources);
  if (!changed.ok()) check_refusal(changed.status());
}

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  epd::test::run(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
