// The engines of all devices, together: their start, their deadlines, their end.
#pragma once

#include "engine.h"

#include <memory>
#include <vector>

namespace epd::supervisor {

class EngineFleet {
 public:
  // Engines write their heartbeats by `clock`. Deadlines use the loop's clock.
  EngineFleet(Loop& loop, const Clock& clock, FleetHost& host, EngineOptions options)
      : context_{loop, clock, host, std::move(options), {}} {}
  EngineFleet(const EngineFleet&) = delete;  // engines refer to the context

  // Makes an engine for each device, and starts them.
  Status start(const std::vector<std::string>& devices);
  void set_options(EngineOptions options) { context_.options = std::move(options); }
  void set_network(transport::NetworkOptions network) { context_.options.network = std::move(network); }

  std::uint32_t size() const { return static_cast<std::uint32_t>(engines_.size()); }
  Engine& operator[](std::uint32_t device) { return *engines_[device]; }
  const Engine& operator[](std::uint32_t device) const { return *engines_[device]; }

  void tick();
  std::uint64_t next_due_ns() const;

  // Sends kStop to all engines, and SIGKILL to those that still run after `grace_ms`. From now on there are
  // no restarts.
  void stop(std::uint32_t grace_ms);
  bool all_stopped() const;
  bool all_settled() const;  // each is ready or failed
  // Whether every engine that should run has made a round since the last call.
  bool all_loops_advanced();
  // Descriptors of messages that wait for space in links.
  std::uint64_t queued_descriptors() const;

 private:
  std::uint64_t check_period_ns() const;

  FleetContext context_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::uint64_t next_check_ns_ = 0;
  std::uint64_t kill_all_ns_ = 0;  // while stopping: when remaining engines are killed
};

}  // namespace epd::supervisor
