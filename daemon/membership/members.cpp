#include "members.h"

#include "proto/arena.h"

#include <algorithm>
#include <utility>

namespace epd::membership {

void Members::stop(const Group& group, Member& member) {
  if (std::holds_alternative<Member::Stopping>(member.calls)) return;
  const auto* stopped = std::get_if<Member::Stopped>(&member.calls);
  const auto* failing = std::get_if<Group::Failing>(&group.state);
  const auto found = group.engines.find(member.engine);
  const EnginePhase engine = found != group.engines.end() ? found->second.phase() : EnginePhase::kAbsent;
  if (stopped != nullptr) {
    has_stopped(member, stopped->next_submit);
  } else if (engine == EnginePhase::kDone || engine == EnginePhase::kAbsent) {
    // What its old engine had taken and not completed can't be known any more.
    has_stopped(member, member.board_index);
  } else if (!member.announced || (failing != nullptr && failing->told && engine == EnginePhase::kBroken)) {
    has_stopped(member, kNever);  // it has submitted nothing, or everything has failed there already
  } else {
    member.calls = Member::Stopping{desk_.due_in_ms(desk_.limits().engine_ack_ms)};
    desk_.emit(SendStopMember{member.engine, {group.id, member.rank, 0, 0}});
  }
}

void Members::has_stopped(Member& member, std::uint64_t next_submit) {
  if (!std::holds_alternative<Member::Stopped>(member.calls)) member.calls = Member::Stopped{next_submit};
  if (!member.leave_request) return;
  desk_.answer(ReplyLeft{{member.session, *member.leave_request}, {member.member, 0}});
  member.leave_request.reset();
}

namespace {

bool shares_device(const Group& group, const Member& member) {
  return std::any_of(group.members.begin(), group.members.end(), [&](const auto& entry) {
    return entry.second.rank != member.rank && entry.second.engine == member.engine;
  });
}

}  // namespace

void Members::reply_joined(const Group& group, const Member& member) {
  const std::uint64_t arena_bytes = abi::UserArenaLayout(group.shape, member.bound).total_bytes;
  const std::uint64_t board_bytes = sizeof(abi::Board);
  desk_.answer(ReplyJoined{
      member.join_id(),
      {member.member, member.rank, group.id, group.epoch, group.resume_index, arena_bytes, board_bytes,
       desk_.limits().operation_ms, group.shape.sum_ranks, shares_device(group, member) ? 1u : 0u, 0},
      group.label()});
}

void Members::release_memory(const Group& group, Member& member) {
  if (!std::exchange(member.holds_memory, false)) return;
  if (!member.evicted.empty()) tell_evicted(group, member);
  desk_.emit(ReleaseMemory{member.engine, group.id, member.rank});
}

// Its session goes on, so nothing else would say that no engine will ever serve it here.
void Members::tell_evicted(const Group& group, const Member& member) {
  desk_.emit(MarkLost{member.engine, group.id, member.rank, StatusCode::kRankLost,
                      static_cast<std::int32_t>(member.rank), member.evicted});
  desk_.emit(WakeSession{member.session});
  if (group.device_kind == abi::DeviceKind::kCuda && !nodes_.is_up(member.engine))
    desk_.emit(CloseStreams{member.engine, group.id, member.rank, true});
}

void Members::end(const Group& group, Member& member) {
  release_memory(group, member);
  if (member.leave_request) has_stopped(member, 0);
  memberships_.free(member.session, member.member);
}

// Its node makes the memory first, and gives it up then, if it has still to make it.
void Members::drop(const Group& group, const Arrival& arrival) {
  desk_.emit(ReleaseMemory{arrival.member.engine, group.id, arrival.member.rank});
  memberships_.free(arrival.member.session, arrival.member.member);
}

}  // namespace epd::membership
