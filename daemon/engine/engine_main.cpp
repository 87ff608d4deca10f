#include "engine/engine_main.h"

#include "base/log.h"
#include "engine.h"

#include <malloc.h>
#include <signal.h>
#include <unistd.h>
#include <memory>

namespace epd {

namespace {

constexpr unsigned kLeaveSeconds = 3;
constexpr int kHeapBytes = 32 << 20;

// The supervisor is gone, which the loop notices by itself, by the link. Should it hang, then this ends it.
void limit_time(int) {
  ::alarm(kLeaveSeconds);
}

}  // namespace

int engine_main(const EngineOptions& options) {
  // Routings come from the heap, large ones too: they would be mappings, of which a process has only so many.
  ::mallopt(M_MMAP_THRESHOLD, kHeapBytes);
  if (options.device.starts_with("cuda:")) {  // see EngineProcess::spawn
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
  on_device_failed([&link] { link.say_device_failed(); });
  const LaunchMode mode = options.resident ? LaunchMode::kResident : LaunchMode::kLaunched;
  auto device = make_device(options.device, mode, clock, [&bell] { bell.ring(); });
  if (device.status().code() == StatusCode::kWouldBlock) return abi::kExitDeviceBusy;
  if (!device.ok()) {
    log_event(LogLevel::kError, "no such device", {{"error", device.status().to_string()}});
    return 2;
  }
  Engine engine(link, bell, page, std::move(device).value(), clock);
  log_event(LogLevel::kInfo, "engine started", {{"device", options.device}});
  const int code = engine.run();
  log_event(LogLevel::kInfo, "engine stopped", {{"device", options.device}, {"code", code}});
  return code;
}

}  // namespace epd
