#include "engine/engine_main.h"

#include "base/log.h"
#include "engine.h"

#include <memory>

namespace epd {

int engine_main(const EngineOptions& options) {
  UniqueFd link(options.link_fd);
  UniqueFd page_fd(options.page_fd);
  UniqueFd bell(options.bell_fd);
  Result<Mapping> page = Mapping::map(page_fd.get(), sizeof(abi::EnginePage), Access::kReadWrite);
  if (!page.ok()) {
    log_event(LogLevel::kError, "engine page can't be mapped", {{"error", page.status().to_string()}});
    return 2;
  }
  const MonotonicClock clock;
  Engine engine(std::move(link), std::move(bell), Page(std::move(page).value()), clock);
  on_device_failed([&engine] { engine.say_device_failed(); });
  auto device = make_device(options.device, [&engine] { engine.wake(); });
  if (device.status().code() == StatusCode::kWouldBlock) return abi::kExitDeviceBusy;
  if (!device.ok()) {
    log_event(LogLevel::kError, "no such device", {{"error", device.status().to_string()}});
    return 2;
  }
  engine.set_device(std::move(device).value());
  log_event(LogLevel::kInfo, "engine started", {{"device", options.device}});
  const int code = engine.run();
  log_event(LogLevel::kInfo, "engine stopped", {{"device", options.device}, {"code", code}});
  return code;
}

}  // namespace epd
