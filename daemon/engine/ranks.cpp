#include "ranks.h"

#include "base/log.h"
#include "calls.h"
#include "device_operation.h"

namespace epd::engine {

using device::Arena;
using device::Launcher;

Status Ranks::map(Group& group, const abi::GroupRank& message, Packet& packet) {
  reclaimer_.take(group.ranks[message.rank]);
  Status status = add_peer(group, message, packet);
  if (status.ok()) status = map_arenas(group, message, packet);
  if (!status.ok()) return status;
  group.ranks[message.rank].place_regions(group.shape);
  group.set_active(message.rank, message.active_since);
  return {};
}

// The page and the bell of an engine stay the same over its restarts. All groups share one mapping.
Status Ranks::add_peer(Group& group, const abi::GroupRank& message, Packet& packet) {
  for (const auto& peer : group.peers) {
    if (peer->device_index == message.device_index) return {};
  }
  std::shared_ptr<PeerEngine> known = peers_[message.device_index].lock();
  if (known == nullptr) {
    Result<Mapping> page = Mapping::map(packet.fds[3].get(), sizeof(abi::EnginePage), Access::kReadOnly);
    if (!page.ok()) return page.status();
    known = std::make_shared<PeerEngine>();
    known->device_index = message.device_index;
    known->bell = std::move(packet.fds[2]);
    known->page = std::move(page).value();
    peers_[message.device_index] = known;
  }
  group.peers.push_back(std::move(known));
  return {};
}

// The supervisor made the arenas. If they can't be mapped that is not the client's fault, but there may be no
// room.
Status Ranks::map_arenas(Group& group, const abi::GroupRank& message, const Packet& packet) const {
  const abi::UserArenaLayout layout(group.shape);
  Result<std::unique_ptr<Arena>> user = device_.map_arena(packet.fds[0].get(), layout.total_bytes);
  if (!user.ok()) return user.status();
  Result<std::unique_ptr<Arena>> exchange =
      device_.map_arena(packet.fds[1].get(), group.exchange_layout.total_bytes);
  if (!exchange.ok()) return exchange.status();
  GroupRankMemory& rank = group.ranks[message.rank];
  rank.user = std::move(user).value();
  rank.exchange = std::move(exchange).value();
  rank.device_index = message.device_index;
  return {};
}

Result<std::unique_ptr<Arena>> Ranks::open_memory(const abi::GroupMemory& message,
                                                  const Packet& packet) const {
  const bool here = message.here != 0;
  if (message.range.by == abi::MemoryBy::kIpcHandle) return device_.map_ipc_memory(message.range, here);
  return device_.map_client_memory(packet.fds, message.range.whole / message.range.pieces, here);
}

// The memory that had the number before is unmapped later: kernels that run may use it.
Status Ranks::map_memory(Group& group, const abi::GroupMemory& message, const Packet& packet) {
  const abi::MemoryRange& range = message.range;
  auto& all = group.ranks[message.rank].mapped;
  if (all.empty()) all.resize(abi::kMaxMapped);
  GroupRankMemory::Mapped& mapped = all[range.number];
  // A range that is mapped while the supervisor describes the group to this engine arrives twice.
  if (range.by != abi::MemoryBy::kNothing && mapped.memory.generation() == range.generation) return {};
  const auto set = [&](const abi::MappedMemory& memory) {
    mapped.memory = memory;
    for (const auto& member : group.members) {
      if (member->calls != nullptr) member->calls->set_memory(message.rank, range.number, memory);
    }
  };
  if (mapped.arena != nullptr) {
    set({});
    device_.retire(std::move(mapped.arena), mapped.whole);
  }
  if (range.by == abi::MemoryBy::kNothing) return {};
  Result<std::unique_ptr<Arena>> opened = open_memory(message, packet);
  if (!opened.ok()) return {opened.status().code(), "memory " + opened.status().message()};
  mapped.arena = std::move(opened).value();
  mapped.whole = range.whole;
  set(abi::MappedMemory::of(reinterpret_cast<std::uintptr_t>(mapped.arena->bytes()) + range.offset,
                            range.bytes, range.generation));
  return {};
}

void Ranks::mask(Group& group, std::uint32_t rank) {
  reclaimer_.take(group.ranks[rank]);
  group.set_active(rank, 0);
}

void Ranks::place_far(Group& group, std::uint32_t rank, std::uint64_t since) {
  reclaimer_.take(group.ranks[rank]);
  group.set_active(rank, since);
}

void Ranks::unmap(Group& group) {
  for (GroupRankMemory& rank : group.ranks) reclaimer_.take(rank);
  group.ranks.clear();
  group.peers.clear();
}

Result<std::unique_ptr<Member>> Ranks::serve(Group& group, const abi::GroupMember& message,
                                             SessionPort& session, const Packet& packet) const {
  Result<Mapping> board =
      Mapping::map(packet.fds[0].get(), abi::WaitsLayout(group.shape).total_bytes, Access::kReadWrite);
  if (!board.ok()) return board.status();
  auto member =
      std::make_unique<Member>(group, message.rank, message.member, &session, std::move(board).value());
  member->first_index = message.first_index;
  const std::uint64_t bytes = abi::ResultsLayout(group.shape).total_bytes;
  Result<std::unique_ptr<Arena>> results = device_.map_results(packet.fds[1].get(), bytes);
  if (!results.ok()) return results.status();
  member->results = std::move(results).value();
  if (Status status = open_lane(group, *member); !status.ok()) return status;
  // Under a break it continues where its former engine stood. kResume says where all continue.
  if (group.life.is(GroupPhase::kRestoring))
    member->next_number = member->board().next_index.load(std::memory_order_relaxed);
  member->statistics = Statistics::of_member(page_, message.session_id, group.id, message.rank);
  return member;
}

Status Ranks::open_lane(Group& group, Member& member) const {
  if (!group.unusable.ok()) return {};
  Launcher& launcher = device_.launcher();
  device::LaneShape shape = lane_shape(group.shape, group.priority);
  if (group.far != nullptr) shape.far = &group.far->group(group.ranks[member.rank].device_index);
  if (device_.traits().has_streams) shape.exchange = group.ranks[member.rank].exchange;
  Result<std::unique_ptr<device::Lane>> lane = launcher.open_lane(shape);
  if (!lane.ok()) {
    group.unusable = lane.status();
    return {};
  }
  member.lane = std::move(lane).value();
  member.view = group_view(group, member.rank);
  const bool cleared =
      device_.traits().memory_is_clear || member.board().memory_cleared.load(std::memory_order_relaxed) != 0;
  if (!cleared) clear_memory(group, member);
  member.calls = std::make_unique<Calls>(member, launcher);
  return {};
}

// The memory of a new rank may hold anything.
void Ranks::clear_memory(const Group& group, const Member& member) const {
  Launcher& launcher = device_.launcher();
  const GroupRankMemory& memory = group.ranks[member.rank];
  // Signals that peers write to a rank that rejoins are theirs to clear, see clear_signals.
  const bool rejoins = group.active_since[member.rank] > group.epoch;
  const std::uint64_t first = rejoins ? group.exchange_layout.routing : 0;
  launcher.clear(memory.exchange->bytes() + first, group.exchange_layout.total_bytes - first);
  launcher.clear(memory.user->bytes(), memory.user_bytes());
  member.board().memory_cleared.store(1, std::memory_order_relaxed);
}

void Ranks::clear_signals(const Group& group) const {
  if (device_.traits().memory_is_clear) return;
  Launcher& launcher = device_.launcher();
  const abi::ExchangeArenaLayout& layout = group.exchange_layout;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    if (group.active_since[rank] != group.epoch) continue;
    for (const auto& member : group.members) {
      for (std::uint32_t block = 0; block < group.shape.depth; ++block) {
        std::byte* base = group.ranks[rank].exchange->bytes() + layout.block_bytes * block;
        for (const std::uint64_t lines : {layout.ready, layout.arrived, layout.called})
          launcher.clear(base + lines + member->rank * sizeof(abi::SignalLine), sizeof(abi::SignalLine));
      }
    }
  }
}

Status Ranks::close_streams(Packet& packet) const {
  const Result<abi::CloseStreams> body = packet.read<abi::CloseStreams>();
  if (!body.ok()) return body.status();
  const abi::CloseStreams& message = body.value();
  Launcher& launcher = device_.launcher();
  if (packet.fds.size() != 1 || !device_.traits().has_streams) return invalid_argument("kCloseStreams");
  Result<std::unique_ptr<Arena>> user = device_.map_arena(packet.fds[0].get(), message.user_bytes);
  if (!user.ok()) {  // the streams wait until their client ends
    log_event(LogLevel::kWarning, "streams not closed", {{"error", user.status().to_string()}});
    return {};
  }
  launcher.close_calls((*user)->bytes() + message.calls);
  return {};
}

}  // namespace epd::engine
