// The supervisor: one loop that admits clients, forms groups, and keeps an engine alive for each device.
#pragma once

#include "supervisor/config.h"
#include "supervisor/control_facade.h"

#include <functional>
#include <memory>
#include <string>

namespace epd::supervisor {

inline constexpr const char* kDaemonVersion = "0.1.0";

struct SupervisorOptions {
  Config config;
  ConfigSources sources;  // read again on SIGHUP
  std::string notify_socket;
  std::uint64_t watchdog_us = 0;
  std::string engine_binary = "/proc/self/exe";  // started as "<binary> engine --device ..."
};

class Supervisor {
 public:
  // Signals that the loop takes (SIGTERM, SIGINT, SIGHUP): call before any thread is started.
  static void block_signals();

  // Opens the attach socket and starts the engines. The calling thread must be the one that calls run():
  // engines die with it.
  static Result<std::unique_ptr<Supervisor>> create(SupervisorOptions options);
  virtual ~Supervisor() = default;

  // May be used from any thread, for as long as the supervisor lives.
  virtual ControlFacade& control() = 0;
  // Called on the loop with true when every engine is ready, false when draining begins.
  virtual void on_serving(std::function<void(bool)> callback) = 0;
  // Runs until drained; returns the exit status of the process.
  virtual int run() = 0;
};

}  // namespace epd::supervisor
