// Effective limits of the configuration: those that are "0", and those of one user.
#include "supervisor/config.h"

#include "base/peer.h"
#include "memory_limit.h"

#include <algorithm>
#include <thread>

namespace epd::supervisor {
namespace {

constexpr std::uint32_t kCudaSms =
    64;  // more make few operations faster; nobody holds them between operations

// `set` is the limit for one user that the configuration sets; 0: it sets none. The result is at least 1.
Quota general_quota(const Caller& caller, std::uint64_t set, std::uint64_t whole, const std::string& key) {
  const std::string own_key = key + "_per_user";
  if (set != 0) return {set, own_key};
  if (is_privileged(caller.uid)) return {whole, own_key};
  return {share_of_one(whole), own_key + ": 3/4 of " + key + " unless the operator sets it"};
}

}  // namespace

std::uint32_t Config::effective_sms(abi::DeviceKind kind) const {
  if (device_sms != 0) return device_sms;
  if (kind == abi::DeviceKind::kCuda) return kCudaSms;
  const std::uint32_t devices = host_devices == kAutomatic ? 1 : std::max(1u, host_devices);
  return std::max(1u, std::thread::hardware_concurrency() / devices);
}

std::uint64_t Config::effective_arena_bytes() const {
  if (max_arena_bytes != 0) return max_arena_bytes;
  return available_memory_bytes() * 16;
}

std::uint64_t Config::effective_network_bytes() const {
  return network_max_bytes != 0 ? network_max_bytes : available_memory_bytes() / 16;
}

std::uint64_t Config::effective_routing_bytes() const {
  return max_routing_bytes != 0 ? max_routing_bytes : available_memory_bytes() / 4;
}

Quota Config::max_sessions_of(const Caller& caller) const {
  return access.max_sessions(
      caller, general_quota(caller, max_sessions_per_user, max_sessions, "limits.max_sessions"));
}

Quota Config::max_groups_of(const Caller& caller) const {
  return access.max_groups(caller,
                           general_quota(caller, max_groups_per_user, max_groups, "limits.max_groups"));
}

Quota Config::most_groups_of(std::uint32_t uid) const {
  return access.most_groups(uid,
                            general_quota({uid, {}}, max_groups_per_user, max_groups, "limits.max_groups"));
}

Quota Config::max_arena_bytes_of(const Caller& caller) const {
  return access.max_arena_bytes(caller, general_quota(caller, max_arena_bytes_per_user,
                                                      effective_arena_bytes(), "limits.max_arena_bytes"));
}

Quota Config::max_routing_bytes_of(const Caller& caller) const {
  return access.max_routing_bytes(caller,
                                  general_quota(caller, max_routing_bytes_per_user, effective_routing_bytes(),
                                                "limits.max_routing_bytes"));
}

}  // namespace epd::supervisor
