// The configuration in force, and what it means for each room.
#pragma once

#include "arena_store.h"
#include "fleet.h"
#include "membership/limits.h"
#include "session/session_table.h"
#include "supervisor/config.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace epd::supervisor {

// Everything but access() belongs to the loop.
class LiveConfig {
 public:
  LiveConfig(Config config, ConfigSources sources);

  const Config* operator->() const { return &config_; }
  // Reads the sources again. If it is not OK, nothing has changed.
  Status reload();
  std::uint64_t generation() const { return generation_; }
  const std::string& last_error() const { return last_error_; }  // of the last reload; empty: it was OK

  // The policy, for any thread.
  std::shared_ptr<const AccessPolicy> access() const;

  session::SessionLimits session_limits() const;
  membership::MembershipLimits membership_limits() const;
  ArenaStore::Limits arena_limits() const;
  EngineFleet::Options fleet_options(const std::string& engine_binary) const;

 private:
  void publish_access();

  Config config_;
  const ConfigSources sources_;
  const transport::NetworkOptions network_;  // as it was at the start
  std::uint64_t generation_ = 1;
  std::string last_error_;
  mutable std::mutex access_mutex_;
  std::shared_ptr<const AccessPolicy> access_;  // config_.access; guarded by access_mutex_
};

}  // namespace epd::supervisor
