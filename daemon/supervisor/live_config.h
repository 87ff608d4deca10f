// The configuration in force, and what it means for each room.
#pragma once

#include "arena_store.h"
#include "fleet.h"
#include "membership/ids.h"
#include "network.h"
#include "session/session_table.h"
#include "supervisor/config.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {

// Everything but access() belongs to the loop.
class LiveConfig {
 public:
  LiveConfig(Config config, ConfigSources sources);

  const Config* operator->() const { return &config_; }
  // Reads the sources again. After an error nothing has changed. An operator's setting stays, unless the
  // sources say something new about it.
  Result<std::vector<ConfigChange>> reload();
  // Sets options, or (no value) has the sources decide again: all of them, or none.
  Result<std::vector<ConfigChange>> set(const OptionSettings& options);
  std::uint64_t generation() const { return generation_; }
  const std::string& last_error() const { return last_error_; }  // of the last reload; empty: it succeeded

  // The policy, for any thread.
  std::shared_ptr<const AccessPolicy> access() const;

  session::SessionLimits session_limits() const;
  membership::MembershipLimits membership_limits() const;
  ArenaStore::Limits arena_limits() const;
  const NetworkChoice& network() const { return network_; }
  void set_network(NetworkChoice choice) { network_ = std::move(choice); }
  transport::NetworkOptions network_options() const;
  EngineOptions fleet_options(const std::string& engine_binary) const;

 private:
  std::vector<ConfigChange> put_in_force(Config config);

  Config configured_;                       // what the sources say
  std::map<std::string, std::string> set_;  // by key: what an operator has set
  Config config_;                           // both together
  const ConfigSources sources_;
  NetworkChoice network_;  // for engines that start from now on
  std::uint64_t generation_ = 1;
  std::string last_error_;
  mutable std::mutex access_mutex_;
  std::shared_ptr<const AccessPolicy> access_;  // config_.access; guarded by access_mutex_
};

}  // namespace epd::supervisor
