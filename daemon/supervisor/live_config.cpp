#include "live_config.h"

#include "base/log.h"
#include "memory_limit.h"

#include <utility>

namespace epd::supervisor {
namespace {

// The end of a process and the start of its successor are seen by different threads, in any order.
constexpr std::uint32_t kJoinConflictMs = 250;

NetworkChoice first_network(const Config& config) {
  if (!config.cluster) return {};
  NetworkChoice choice = choose_network(*config.cluster, config.network_devices);
  if (choice.devices.empty())
    log_event(LogLevel::kWarning, "engines reach no other node yet", {{"reason", choice.problem}});
  return choice;
}

}  // namespace

LiveConfig::LiveConfig(Config config, ConfigSources sources)
    : configured_(std::move(config)), sources_(std::move(sources)), network_(first_network(configured_)) {
  put_in_force(configured_);
}

Result<std::vector<ConfigChange>> LiveConfig::reload() {
  Result<Config> loaded = reload_config(configured_, sources_);
  if (!loaded.ok()) {
    last_error_ = loaded.status().message();
    return loaded.status();
  }
  std::map<std::string, std::string> still_set = set_;
  for (const ConfigChange& change : changes_between(configured_, *loaded)) still_set.erase(change.key);
  Result<Config> together = with_options(*loaded, still_set);
  if (!together.ok()) {
    last_error_ = together.status().message();
    return together.status();
  }
  configured_ = std::move(*loaded);
  set_ = std::move(still_set);
  ++generation_;
  last_error_.clear();
  return put_in_force(std::move(*together));
}

Result<std::vector<ConfigChange>> LiveConfig::set(const OptionSettings& options) {
  std::map<std::string, std::string> wanted = set_;
  for (const auto& [key, value] : options) {
    wanted.erase(key);
    // One that is to be unset must be one that could be set.
    if (!value && !is_settable(key)) return with_options(configured_, {{key, ""}}).status();
    if (value) wanted[key] = *value;
  }
  Result<Config> together = with_options(configured_, wanted);
  if (!together.ok()) return together.status();
  set_ = std::move(wanted);
  return put_in_force(std::move(*together));
}

std::vector<ConfigChange> LiveConfig::put_in_force(Config config) {
  std::vector<ConfigChange> changes = changes_between(config_, config);
  config_ = std::move(config);
  auto access = std::make_shared<const AccessPolicy>(config_.access);
  const std::lock_guard lock(access_mutex_);
  access_ = std::move(access);
  return changes;
}

std::shared_ptr<const AccessPolicy> LiveConfig::access() const {
  const std::lock_guard lock(access_mutex_);
  return access_;
}

session::SessionLimits LiveConfig::session_limits() const {
  return {config_.max_sessions, config_.attach_ms};
}

membership::MembershipLimits LiveConfig::membership_limits() const {
  return {config_.max_groups,   config_.join_ms, config_.engine_ack_ms, config_.engine_watchdog_ms,
          config_.operation_ms, abi::kLastEpoch, kJoinConflictMs};
}

ArenaStore::Limits LiveConfig::arena_limits() const {
  return {config_.effective_arena_bytes(), config_.effective_routing_bytes(),
          MappingLimit::of_kernel(config_.max_sessions), max_bytes_of_filler()};
}

transport::NetworkOptions LiveConfig::network_options() const {
  return supervisor::network_options(config_, network_);
}

EngineOptions LiveConfig::fleet_options(const std::string& engine_binary) const {
  return {engine_binary,
          config_.log_levels(),
          config_.format(),
          config_.engine_watchdog_ms,
          config_.restart_backoff_min_ms,
          config_.restart_backoff_max_ms,
          config_.max_restarts_per_minute,
          network_options()};
}

}  // namespace epd::supervisor
