// Start, drain, stop and reload: what the daemon is about, and what systemd is told of it.
#pragma once

#include "gpu_work.h"
#include "notify.h"
#include "operator_settings.h"
#include "orders.h"
#include "rooms.h"
#include "supervisor/supervisor.h"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

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
  std::uint64_t drain_due_ns() const { return drain_due_ns_; }  // while it drains
  Status admitting() const;                                     // OK, or that it drains
  void drain(const Operator& by, std::uint32_t timeout_ms);     // 0: the configured one; again: no change

  // Once per turn of the loop: goes on to the next phase, and tells systemd.
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  void on_signal();
  void begin_stopping();
  void reload(const Operator& by);
  void apply_config();
  void notify_status(const std::string& prefix);

  const Rooms& rooms_;
  const Parts parts_;
  const SupervisorOptions& options_;
  ServiceNotifier notifier_;
  UniqueFd signals_;
  DaemonPhase phase_ = DaemonPhase::kStarting;
  std::function<void(bool)> on_serving_;
  std::uint64_t drain_due_ns_ = 0;
  std::uint64_t next_ping_ns_ = 0;
  std::string last_status_;
};

}  // namespace epd::supervisor
