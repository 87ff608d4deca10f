// Start, drain, stop and reload: the phase of the daemon's life, and what systemd is told of it.
#pragma once

#include "gpu_work.h"
#include "notify.h"
#include "operator_settings.h"
#include "orders.h"
#include "rooms.h"
#include "socket_watch.h"
#include "supervisor/supervisor.h"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {

enum class DaemonPhase { kStarting, kServing, kDraining, kStopping };

class Lifecycle {
 public:
  struct Parts {
    Orders& orders;
    OperatorSettings& settings;
    GpuWork& gpu_work;
  };
  Lifecycle(const Rooms& rooms, const Parts& parts, const SupervisorOptions& options);

  Status watch_signals();
  void on_serving(std::function<void(bool)> callback) { on_serving_ = std::move(callback); }

  DaemonPhase phase() const { return phase_; }
  std::uint64_t drain_due_ns() const { return drain_due_ns_; }  // valid while it drains
  const std::string& socket_problem() const { return sockets_.problem(); }
  Status admitting() const;  // OK, or that the daemon drains
  // timeout_ms of 0: the configured timeout. A second drain changes nothing.
  void drain(const Operator& by, std::uint32_t timeout_ms);
  // Reads the configuration again. A refusal changes nothing.
  Result<std::vector<ConfigChange>> reload(const Operator& by);
  // Sets options for as long as the daemon runs; no value: as configured again.
  Result<std::vector<ConfigChange>> set_options(const Operator& by, const OptionSettings& options);

  // Called in each turn of the loop: enters the next phase, and tells systemd.
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  void on_signal();
  void begin_stopping();
  void apply_config();
  void notify_stopping(std::uint64_t drain_ms);
  void notify_status();

  const Rooms& rooms_;
  const Parts parts_;
  const SupervisorOptions& options_;
  ServiceNotifier notifier_;
  SocketWatch sockets_;
  UniqueFd signals_;
  DaemonPhase phase_ = DaemonPhase::kStarting;
  std::function<void(bool)> on_serving_;
  std::uint64_t drain_due_ns_ = 0;
  std::uint64_t next_ping_ns_ = 0;
  std::string last_status_;
};

}  // namespace epd::supervisor
