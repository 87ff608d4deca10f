#include "engine/engine_main.h"

#include "base/log.h"
#include "engine.h"
#include "transport/ucx.h"

#include <malloc.h>
#include <signal.h>
#include <unistd.h>
#include <chrono>
#include <memory>

namespace epd::engine {

namespace {

constexpr unsigned kLeaveSeconds = 3;
constexpr int kHeapBytes = 32 << 20;
constexpr std::chrono::seconds kNetworkPause{2};  // between attempts to open it
constexpr std::uint64_t kProxySpinNs = 50'000;    // until kSettings

pid_t g_supervisor = 0;

// The supervisor has ended. The loop notices that by the link. This ends the process if the loop hangs.
void limit_time(int) {
  if (::getppid() == g_supervisor) return;  // somebody else has sent the signal
  ::signal(SIGALRM, SIG_DFL);
  ::alarm(kLeaveSeconds);
}

Result<std::unique_ptr<transport::Transport>> open_ucx_network(const transport::NetworkOptions& network,
                                                               const transport::Limits& limits) {
  transport::UcxOptions ucx;
  ucx.library = network.library;
  ucx.devices = network.devices;
  ucx.transports = network.transports;
  ucx.limits = limits;
  return transport::open_ucx(ucx);
}

// A network that can't be opened is no reason to end: groups of this node are still served.
Result<std::unique_ptr<FarProxy>> start_proxy(const EngineOptions& options, const OpenTransport& open,
                                              Bell& bell) {
  const auto unsupported = [](std::string why) { return Status(StatusCode::kUnsupported, std::move(why)); };
  if (options.network.library.empty()) return unsupported("this engine was given no network to other nodes");
  if (!options.device.starts_with("host:"))
    return unsupported("groups that span nodes are for host devices; this is " + options.device);
  transport::Limits limits;
  limits.max_body_bytes = far_body_bytes(options.network);
  Result<std::unique_ptr<FarProxy>> proxy =
      FarProxy::start([&] { return open(limits); }, kProxySpinNs, [&bell] { bell.ring(); });
  if (proxy.ok() && (*proxy)->address().size() > abi::kMaxFarAddressBytes)
    proxy = Result<std::unique_ptr<FarProxy>>(
        unsupported("the network address of this engine has " + std::to_string((*proxy)->address().size()) +
                    " bytes; allowed: " + std::to_string(abi::kMaxFarAddressBytes)));
  if (!proxy.ok())
    log_event(LogLevel::kError, "engines of other nodes can't be reached",
              {{"error", proxy.status().to_string()}});
  return proxy;
}

// Waits until the network can be opened. Then this engine ends, and its successor uses the network: an engine
// tells its address when it says that it is ready.
std::unique_ptr<LateNetwork> wait_for_network(const EngineOptions& options, const OpenTransport& open,
                                              Bell& bell) {
  if (options.network.library.empty() || !options.device.starts_with("host:")) return nullptr;
  const auto opens = [open, limits = transport::Limits{}] { return open(limits).ok(); };
  return std::make_unique<LateNetwork>(opens, kNetworkPause, [&bell] { bell.ring(); });
}

}  // namespace

int engine_main(const EngineOptions& options) {
  return engine_main(options, [&options](const transport::Limits& limits) {
    return open_ucx_network(options.network, limits);
  });
}

int engine_main(const EngineOptions& options, const OpenTransport& open) {
  // Routings come from the heap, large ones too. As mappings they would count against the process's limit.
  ::mallopt(M_MMAP_THRESHOLD, kHeapBytes);
  if (options.device.starts_with("cuda:")) {  // see EngineProcess::spawn
    g_supervisor = ::getppid();
    struct sigaction action = {};
    action.sa_handler = limit_time;
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGTERM, &action, nullptr);
  }
  SupervisorLink link(UniqueFd(options.link_fd));
  UniqueFd page_fd(options.page_fd);
  UniqueFd bell_fd(options.bell_fd);
  Result<Mapping> mapping = Mapping::map(page_fd.get(), sizeof(abi::EnginePage), Access::kReadWrite);
  if (!mapping.ok()) {
    log_event(LogLevel::kError, "engine page can't be mapped", {{"error", mapping.status().to_string()}});
    return 2;
  }
  const MonotonicClock clock;
  Page page(std::move(mapping).value());
  Bell bell(std::move(bell_fd), page);
  device::on_device_failed([&link] { link.say_device_failed(); });
  auto device = device::make_device(options.device, clock, [&bell] { bell.ring(); });
  if (device.status().code() == StatusCode::kWouldBlock) return abi::kExitDeviceBusy;
  if (!device.ok()) {
    log_event(LogLevel::kError, "no such device", {{"error", device.status().to_string()}});
    return 2;
  }
  Engine::Network network{start_proxy(options, open, bell), options.network};
  if (!network.proxy.ok()) network.late = wait_for_network(options, open, bell);
  Engine engine(link, bell, page, std::move(device).value(), std::move(network), clock);
  log_event(LogLevel::kDebug, "engine runs", {{"device", options.device}});
  const int code = engine.run();
  log_event(LogLevel::kInfo, "engine stopped", {{"device", options.device}, {"code", code}});
  return code;
}

}  // namespace epd::engine
