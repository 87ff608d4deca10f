// The engine: one loop that lets the device carry out calls, reads how they have ended, and obeys the
// supervisor. It has one thread. The device's helper threads only run pieces of operations. The loop works on
// objects (README, "Objects"), which the engine makes, connects and calls in each round.
#pragma once

#include "device/device.h"
#include "device_watch.h"
#include "far_engines.h"
#include "groups.h"
#include "late_network.h"
#include "page.h"
#include "round_clock.h"
#include "sessions.h"
#include "supervisor_link.h"

#include <cstdint>
#include <memory>

namespace epd::engine {

class Engine {
 public:
  // How engines of other nodes reach this one, or why they can't.
  struct Network {
    Result<std::unique_ptr<FarProxy>> proxy;
    transport::NetworkOptions options;
    std::unique_ptr<LateNetwork> late{};  // set if there is no proxy yet and there is to be one
  };
  // The device's and the proxy's `notify` must ring the bell.
  Engine(SupervisorLink& link, Bell& bell, Page& page, std::unique_ptr<device::Device> device,
         Network network, const Clock& clock);

  // Runs until kStop or the end of the link. Returns the process's exit code.
  int run();

 private:
  void listen();
  void say_ready();
  Status apply_settings(const abi::Settings& message);
  Status remove_session(const abi::SessionRef& message);
  int leave();
  bool spin();
  void grow_spin_budget();
  void sleep();
  void set_sleeping(bool sleeping);
  bool anything_pending() const;
  std::uint64_t next_look_ns(std::uint64_t now) const;

  SupervisorLink& link_;
  Bell& bell_;
  Page& page_;
  RoundClock clock_;
  const std::unique_ptr<device::Device> device_;
  DeviceWatch watch_;
  Sessions sessions_;
  const std::unique_ptr<LateNetwork> late_network_;
  FarEngines far_engines_;
  Groups groups_;
  std::uint64_t spin_limit_ns_ = 50'000;
  std::uint64_t spin_budget_ns_ = 0;
  std::uint64_t last_link_ns_ = 0;
};

}  // namespace epd::engine
