// Ranks that were lost because they were late come back, when all ranks that live ask for it.
#include "session.h"

#include <algorithm>
#include <utility>

namespace epd::client {
namespace {

// 0: none.
epd_ticket_t in_flight(Group& group) {
  epd_ticket_t ticket = 0;
  for (std::uint32_t slot = 0; ticket == 0 && slot < group.shape.depth; ++slot)
    ticket = group.calls.host_call_on(slot);
  return ticket;
}

}  // namespace

Status Session::may_restore(Group& group) {
  const auto policy = static_cast<std::uint32_t>(group.shape.policy);
  if (group.shape.policy != abi::LossPolicy::kDegradeLate)
    return bad_value("policy", policy, "2 (EPD_POLICY_DEGRADE_LATE), for groups whose late ranks come back");
  if (group.shape.span != abi::Span::kNode)
    return {
        StatusCode::kUnsupported,
        "the group spans nodes; allowed: groups of one node (EPD_SPAN_NODE), or to leave and join it anew"};
  if (in_hook_thread()) return invalid_argument("a hook may not wait for late ranks");
  Lock lock = waits_.lock();
  note_end_locked();
  if (!connection_.ended().ok()) return connection_.ended();
  if (group.board.lost()) return {};
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  Status status = group.usable_in(group.epoch);
  const epd_ticket_t ticket = status.ok() ? in_flight(group) : 0;
  if (ticket != 0) return would_block("ticket " + std::to_string(ticket) + " is in flight");
  return status;
}

Status Session::restore(Group& group, std::int32_t timeout_ms, epd_resume_info_t& info) {
  Status status = check_limit(timeout_ms, "the daemon's default");
  if (status.ok()) status = may_restore(group);
  if (!status.ok()) return status;
  const std::int64_t wait_ms = timeout_ms == 0 ? kLongestJoinMs : timeout_ms;
  // A rank that takes part hears of the break as it begins. One that comes back hears of its end.
  const std::int64_t margin_ms = group.board.lost() ? kLongestJoinMs : kReplyMarginMs;
  abi::Join join = group.request;
  join.rank = static_cast<std::int32_t>(group.rank);
  join.timeout_ms = static_cast<std::uint32_t>(timeout_ms);
  join.restores = group.id;
  Packet reply;
  status = connection_.request({abi::AttachType::kJoin, abi::AttachType::kJoined, &join, sizeof(join),
                                Deadline::in_ms(wait_ms), Deadline::in_ms(wait_ms + margin_ms)},
                               reply);
  if (!status.ok()) return status;
  const auto joined = reply.read<abi::Joined>();
  if (!joined.ok() || joined.value().kept == 0) return come_back(group, reply, info);
  return resume(group, EPD_FOREVER, Deadline::in_ms(EPD_FOREVER), joined.value().epoch, info);
}

Status Session::come_back(Group& former, Packet& reply, epd_resume_info_t& info) {
  std::list<std::unique_ptr<Group>> made;
  made.push_back(std::make_unique<Group>(this, former.shape));
  Group& group = *made.front();
  group.request = former.request;
  group.group_name = former.group_name;
  end_operations(former);
  Status status = adopt_joined(reply, group, &former);
  if (!status.ok()) {
    if (group.user.valid()) std::swap(group.user, former.user);  // what callers know stays mapped
    if (group.board.valid()) std::swap(group.board, former.board);
    connection_.leave(group.member, Deadline::in_ms(kLeaveMs));
    return status;
  }
  streams_.remove(former);
  {
    const Lock lock = waits_.lock();
    streams_.add_locked(group);
    const auto found = std::find_if(groups_.begin(), groups_.end(),
                                    [&former](const auto& other) { return other.get() == &former; });
    found->swap(made.front());
    former.given->move_to(group);
  }
  map_registered(group);
  info.epoch = group.epoch;
  info.resume_op = group.next_index;
  BoardSnapshot board;
  if (group.board.snapshot(board)) info.num_active_ranks = board.num_active_ranks;
  return {};  // `made` has the former one, which ends without the mutex
}

}  // namespace epd::client
