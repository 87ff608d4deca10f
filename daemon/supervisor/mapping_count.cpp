#include "mapping_count.h"

#include <algorithm>
#include <fstream>

namespace epd {
namespace {

constexpr std::uint64_t kArenas = 2;  // user, exchange
constexpr std::uint64_t kBoard = 1;
constexpr std::uint64_t kSession = 2;  // segments
constexpr std::uint64_t kProcess = 8192;

}  // namespace

MappingLimit MappingLimit::of_kernel(std::uint32_t max_sessions) {
  MappingLimit limit;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit.kernel;
  limit.reserve = std::min(kProcess + kSession * max_sessions, limit.kernel / 2);
  return limit;
}

Status MappingCount::refuse(const std::string& who, std::uint64_t used, std::uint64_t more) const {
  return resource_exhausted(who + " has " + std::to_string(used) +
                            " memory mappings for ranks and would need " + std::to_string(more) +
                            " more; allowed: " + std::to_string(limit_.allowed()) +
                            " (vm.max_map_count, set by sysctl, is " + std::to_string(limit_.kernel) +
                            ", of which the daemon keeps " + std::to_string(limit_.reserve) + " for itself)");
}

Status MappingCount::add(std::pair<std::uint64_t, std::uint32_t> member, const DeviceName& device,
                         std::uint64_t client_memories) {
  const Device its{device.kind, device.index};
  const std::uint64_t cost = kArenas + client_memories;
  const auto found = groups_.find(member.first);
  static const Group kNone;
  const Group& group = found == groups_.end() ? kNone : found->second;
  const bool is_new = group.devices.count(its) == 0;
  const auto room = [&](const Device& engine, std::uint64_t more) -> Status {
    const auto use = engines_.find(engine);
    const std::uint64_t used = use == engines_.end() ? 0 : use->second;
    if (used + more <= limit_.allowed()) return {};
    return refuse("the engine of " + DeviceName{engine.first, engine.second}.text(), used, more);
  };
  const std::uint64_t own = cost + kBoard + (is_new ? group.mappings : 0);
  if (Status status = room(its, own); !status.ok()) return status;
  for (const auto& [engine, ranks] : group.devices) {
    if (engine == its) continue;
    if (Status status = room(engine, cost); !status.ok()) return status;
  }
  if (own_ + kBoard > limit_.allowed()) return refuse("the supervisor", own_, kBoard);

  for (const auto& [engine, ranks] : group.devices) {
    if (engine != its) engines_[engine] += cost;
  }
  engines_[its] += own;
  own_ += kBoard;
  Group& changed = groups_[member.first];
  changed.ranks[member.second] = {its, cost};
  changed.mappings += cost;
  ++changed.devices[its];
  return {};
}

// An engine without a rank of the group forgets it.
void MappingCount::remove(std::pair<std::uint64_t, std::uint32_t> member) {
  const auto found = groups_.find(member.first);
  if (found == groups_.end() || found->second.ranks.count(member.second) == 0) return;
  Group& group = found->second;
  const Rank rank = group.ranks.at(member.second);
  group.ranks.erase(member.second);
  for (const auto& [engine, ranks] : group.devices) engines_[engine] -= rank.mappings;
  engines_[rank.device] -= kBoard;
  own_ -= kBoard;
  group.mappings -= rank.mappings;
  if (--group.devices[rank.device] == 0) {
    engines_[rank.device] -= group.mappings;
    group.devices.erase(rank.device);
  }
  if (group.ranks.empty()) groups_.erase(found);
}

std::uint64_t MappingCount::of_engine(const DeviceName& device) const {
  const auto found = engines_.find({device.kind, device.index});
  return found == engines_.end() ? 0 : found->second;
}

}  // namespace epd
