#include "mapping_count.h"

#include <algorithm>
#include <fstream>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kArenas = 2;  // user, exchange
constexpr std::uint64_t kBoard = 1;
constexpr std::uint64_t kOwn = kBoard + 1;  // of the rank's own engine: the results too
constexpr std::uint64_t kSession =
    4;  // segments in an engine; in the supervisor the stack of its porter and a guard
constexpr std::uint64_t kProcess = 8192;
constexpr const char* kSupervisor = "the supervisor";

std::string engine_of(const device::DeviceName& device) {
  return "the engine of " + device.text();
}

}  // namespace

MappingLimit MappingLimit::of_kernel(std::uint32_t max_sessions) {
  MappingLimit limit;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit.kernel;
  limit.reserve = std::min(kProcess + kSession * max_sessions, limit.kernel / 2);
  return limit;
}

Status MappingCount::check(const Process& process, std::uint32_t uid, std::uint64_t more) const {
  const auto refuse = [&](const std::string& whose, std::uint64_t used, std::uint64_t allowed) {
    return resource_exhausted(process + " has " + std::to_string(used) + " memory mappings for ranks" +
                              whose + " and would need " + std::to_string(more) +
                              " more; allowed: " + std::to_string(allowed) +
                              " (vm.max_map_count, set by sysctl, is " + std::to_string(limit_.kernel) +
                              ", of which the daemon keeps " + std::to_string(limit_.reserve) +
                              " for itself; one user may have half of the rest)");
  };
  const auto found = used_.find(process);
  const Use use = found == used_.end() ? Use{} : found->second;
  if (use.all + more > limit_.allowed()) return refuse("", use.all, limit_.allowed());
  const auto own = use.of_user.find(uid);
  const std::uint64_t of_user = own == use.of_user.end() ? 0 : own->second;
  if (of_user + more <= limit_.allowed() / 2) return {};
  return refuse(" of user " + std::to_string(uid), of_user, limit_.allowed() / 2);
}

void MappingCount::take(const Process& process, std::uint32_t uid, std::uint64_t mappings) {
  Use& use = used_[process];
  use.all += mappings;
  use.of_user[uid] += mappings;
}

void MappingCount::give_back(const Process& process, std::uint32_t uid, std::uint64_t mappings) {
  if (mappings == 0) return;
  Use& use = used_.at(process);
  use.all -= mappings;
  std::uint64_t& own = use.of_user.at(uid);
  own -= mappings;
  if (own == 0) use.of_user.erase(uid);
}

Status MappingCount::add(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid,
                         const device::DeviceName& device) {
  const std::string its = engine_of(device);
  const auto found = groups_.find(member.first);
  std::map<Process, std::uint64_t> more = {{its, kArenas + kOwn}, {kSupervisor, kBoard}};
  if (found != groups_.end()) {
    // An engine that has no other rank of the group maps the memory of all ranks.
    if (found->second.engines.count(its) == 0) more[its] += kArenas * found->second.ranks.size();
    for (const auto& [engine, ranks] : found->second.engines) more.try_emplace(engine, kArenas);
  }
  for (const auto& [process, mappings] : more) {
    if (Status status = check(process, uid, mappings); !status.ok()) return status;
  }
  for (const auto& [process, mappings] : more) take(process, uid, mappings);
  Group& group = groups_[member.first];
  group.uid = uid;
  group.ranks[member.second] = its;
  ++group.engines[its];
  return {};
}

// An engine without a rank of the group unmaps it.
void MappingCount::remove(std::pair<std::uint64_t, std::uint32_t> member) {
  const auto found = groups_.find(member.first);
  if (found == groups_.end() || found->second.ranks.count(member.second) == 0) return;
  Group& group = found->second;
  const Process its = group.ranks.at(member.second);
  group.ranks.erase(member.second);
  for (const auto& [engine, ranks] : group.engines) give_back(engine, group.uid, kArenas);
  give_back(its, group.uid, kOwn);
  give_back(kSupervisor, group.uid, kBoard);
  if (--group.engines[its] == 0) {
    give_back(its, group.uid, kArenas * group.ranks.size());
    group.engines.erase(its);
  }
  if (group.ranks.empty()) groups_.erase(found);
}

std::uint64_t MappingCount::of_engine(const device::DeviceName& device) const {
  const auto found = used_.find(engine_of(device));
  return found == used_.end() ? 0 : found->second.all;
}

}  // namespace epd::supervisor
