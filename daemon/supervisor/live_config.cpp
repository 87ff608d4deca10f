#include "live_config.h"

#include "network.h"

#include <utility>

namespace epd::supervisor {
namespace {

// A process that ends and one that takes its place are heard of by different threads.
constexpr std::uint32_t kJoinConflictMs = 250;

}  // namespace

LiveConfig::LiveConfig(Config config, ConfigSources sources)
    : config_(std::move(config)), sources_(std::move(sources)), network_(network_options(config_)) {
  publish_access();
}

Status LiveConfig::reload() {
  Result<Config> loaded = reload_config(config_, sources_);
  if (!loaded.ok()) {
    last_error_ = loaded.status().message();
    return loaded.status();
  }
  config_ = std::move(*loaded);
  publish_access();
  ++generation_;
  last_error_.clear();
  return {};
}

void LiveConfig::publish_access() {
  auto access = std::make_shared<const AccessPolicy>(config_.access);
  const std::lock_guard lock(access_mutex_);
  access_ = std::move(access);
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
          MappingLimit::of_kernel(config_.max_sessions)};
}

EngineFleet::Options LiveConfig::fleet_options(const std::string& engine_binary) const {
  return {engine_binary,
          config_.level(),
          config_.format(),
          config_.engine_watchdog_ms,
          config_.restart_backoff_min_ms,
          config_.restart_backoff_max_ms,
          config_.max_restarts_per_minute,
          network_};
}

}  // namespace epd::supervisor
