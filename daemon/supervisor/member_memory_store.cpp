#include "member_memory_store.h"

#include "device_list.h"
#include "fleet.h"
#include "live_config.h"
#include "session/session_table.h"

#include <string>
#include <utility>

namespace epd::supervisor {

MemberMemoryStore::MemberMemoryStore(const Rooms& rooms, Closer& closer, DescriptorBudget& descriptors)
    : rooms_(rooms),
      descriptors_(descriptors),
      arenas_(rooms.config.arena_limits(), closer, descriptors),
      open_streams_(rooms.devices.size()) {}

const MemberArenas* MemberMemoryStore::find(std::uint64_t group_id, std::uint32_t rank) const {
  return arenas_.find(group_id, rank);
}

std::vector<membership::BoardIndex> MemberMemoryStore::boards_on(
    std::uint32_t device, std::optional<std::uint64_t> group_id) const {
  const device::DeviceName& name = rooms_.devices[device].name;
  std::vector<membership::BoardIndex> boards;
  for (const auto& [member, arenas] : arenas_.all()) {
    const bool here = arenas.device.kind == name.kind && arenas.device.index == name.index;
    if (here && (!group_id || *group_id == member.first))
      boards.push_back({member.first, member.second, arenas.next_index()});
  }
  return boards;
}

Status MemberMemoryStore::acquire(const membership::AcquireMemory& action) {
  const session::Session* session = rooms_.sessions.find(action.request.session.number);
  if (session == nullptr) return {StatusCode::kAborted, "its session has closed"};
  // The engine does not read its link. Messages that wait there hold descriptors of their own.
  const std::uint64_t waiting = rooms_.fleet.queued_descriptors();
  if (waiting > descriptors_.allowed() / 4) {
    return resource_exhausted("messages to engines that do not read them hold " + std::to_string(waiting) +
                              " descriptors; allowed for another join: " +
                              std::to_string(descriptors_.allowed() / 4) + " (a quarter of RLIMIT_NOFILE)");
  }
  const Caller caller{session->peer.uid, session->peer.gids};
  const UserQuotas quotas{rooms_.config->max_arena_bytes_of(caller),
                          rooms_.config->max_routing_bytes_of(caller)};
  return arenas_.acquire({action.group_id, action.rank}, action.uid, quotas,
                         rooms_.devices[action.engine.device].name, {action.shape, session->id});
}

void MemberMemoryStore::mark_lost(const membership::MarkLost& action) {
  arenas_.mark_lost(action.group_id, action.rank, action.text, action.cause, action.failed_rank);
}

// If no descriptor is left, the streams wait until their client leaves.
void MemberMemoryStore::close_streams_later(const membership::CloseStreams& action) {
  const MemberArenas* arenas = arenas_.find(action.group_id, action.rank);
  if (arenas == nullptr) return;
  Result<UniqueFd> user = duplicate(arenas->user.get());
  if (user.ok()) open_streams_[action.engine.device].push_back({arenas->streams(), std::move(*user)});
}

std::vector<MemberMemoryStore::OpenStreams> MemberMemoryStore::take_open_streams(std::uint32_t device) {
  return std::exchange(open_streams_[device], {});
}

}  // namespace epd::supervisor
