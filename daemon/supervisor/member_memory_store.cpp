#include "member_memory_store.h"

#include "device_list.h"
#include "fleet.h"
#include "live_config.h"

#include <utility>

namespace epd {

MemberMemoryStore::MemberMemoryStore(const Rooms& rooms, Closer& closer, DescriptorBudget& descriptors)
    : rooms_(rooms),
      descriptors_(descriptors),
      arenas_(rooms.config.arena_limits(), closer, descriptors),
      open_streams_(rooms.devices.size()) {}

const MemberArenas* MemberMemoryStore::find(std::uint64_t group_id, std::uint32_t rank) const {
  return arenas_.find(group_id, rank);
}

Status MemberMemoryStore::check_reach(std::uint32_t device, std::uint32_t other) const {
  return rooms_.devices.check_reach(device, other);
}

Status MemberMemoryStore::acquire(const membership::MemoryOwner& owner, const UserQuotas& quotas,
                                  const abi::GroupShape& shape, const abi::Bindings& bindings,
                                  const membership::ClientMemory& memory) {
  // An engine that does not read its link: what is sent meanwhile waits there, with descriptors of its own.
  const std::uint64_t waiting = rooms_.fleet.queued_descriptors();
  if (waiting > descriptors_.allowed() / 4) {
    return resource_exhausted("messages to engines that do not read them hold " + std::to_string(waiting) +
                              " descriptors; allowed for another join: " +
                              std::to_string(descriptors_.allowed() / 4) + " (a quarter of RLIMIT_NOFILE)");
  }
  return arenas_.acquire({owner.group_id, owner.rank}, owner.uid, quotas, rooms_.devices[owner.device].name,
                         {shape, bindings, memory, rooms_.devices.is_resident(owner.device)});
}

void MemberMemoryStore::release(std::uint64_t group_id, std::uint32_t rank) {
  arenas_.release(group_id, rank);
}

std::uint64_t MemberMemoryStore::next_index(std::uint64_t group_id, std::uint32_t rank) {
  return arenas_.next_index(group_id, rank);
}

// If no descriptor is left, the streams wait until their client leaves.
void MemberMemoryStore::close_streams_later(std::uint32_t device, std::uint64_t group_id,
                                            std::uint32_t rank) {
  const MemberArenas* arenas = arenas_.find(group_id, rank);
  Result<UniqueFd> user = duplicate(arenas->user.get());
  if (user.ok()) open_streams_[device].push_back({arenas->streams(), std::move(*user)});
}

std::vector<MemberMemoryStore::OpenStreams> MemberMemoryStore::take_open_streams(std::uint32_t device) {
  return std::exchange(open_streams_[device], {});
}

void MemberMemoryStore::mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text,
                                  StatusCode cause, std::int32_t culprit_rank) {
  arenas_.mark_lost(group_id, rank, text, cause, culprit_rank);
}

}  // namespace epd
