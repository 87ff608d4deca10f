#include "restart.h"

#include "failures.h"
#include "operation.h"

#include <algorithm>
#include <vector>

namespace epd::engine {

using abi::Op;
using device::Launcher;

namespace {

// The last operation that the rank has announced in this epoch, also to itself: those before it have ended.
// What an earlier epoch left may be of operations that were undone. 0: none, or operation 0.
std::uint64_t last_begun(const Member& member, Launcher& launcher) {
  const Group& group = member.group;
  const abi::ExchangeArenaLayout& layout = group.exchange_layout;
  std::vector<abi::SignalLine> lines(group.shape.depth);  // in each block the rank's own line
  launcher.read_rows(lines.data(), member.exchange() + layout.ready + member.rank * sizeof(lines[0]),
                     sizeof(lines[0]), layout.block_bytes, lines.size());
  std::uint64_t last = 0;
  for (const abi::SignalLine& line : lines) {
    if (abi::epoch_of_tag(line.tag) == group.epoch)
      last = std::max(last, group.from_tags(abi::index_of_tag(line.tag)));
  }
  return last;
}

// What the rank has announced of an operation, if no later one uses its block.
abi::OpAnnouncement announced(const Member& member, Launcher& launcher, std::uint64_t index) {
  abi::OpAnnouncement own{};
  launcher.read(
      &own, own_block(member, index) + member.group.exchange_layout.announcement + member.rank * sizeof(own),
      sizeof(own));
  return own;
}

// Publishes the counts of a dispatch from the routing that it made or used.
void publish_kept_counts(const Member& member, Launcher& launcher, const abi::InflightRecord& dispatch,
                         const RouteHeads::Place& route) {
  if (member.board().slots[dispatch.slot].counts_ticket.load() >= dispatch.ticket) return;
  const abi::GroupShape& shape = member.group.shape;
  kernels::Placement placement;
  placement.reset(shape.num_ranks, shape.num_experts, shape.per_expert());
  const std::span<std::int32_t> words = placement.words();
  launcher.read(words.data(), route.half + member.group.exchange_layout.placement, words.size_bytes());
  placement.num_recv_rows = route.head.num_recv_rows;
  member.publish_counts(dispatch.slot, dispatch.ticket, placement);
}

// Whether the operation names what its group has.
bool is_sound(const Member& member, const abi::InflightRecord& record) {
  return record.slot < member.group.shape.depth && record.route < member.group.shape.num_routes();
}

// The ending of an operation that has ended since, as the former engine would have found it.
SessionPort::Ending found_ending(const Member& member, Launcher& launcher,
                                 const abi::InflightRecord& record) {
  const abi::OpAnnouncement own = announced(member, launcher, record.op_index);
  const std::uint64_t made_by = own.routing == 0 ? record.op_index : abi::index_of_tag(own.routing);
  const RouteHeads::Place route = member.heads->find(record.route, made_by, member.exchange());
  if (route.half == nullptr) return {};  // made before this rank joined: it has no rows
  if (own.op != static_cast<std::uint32_t>(Op::kDispatch)) return {0, route.head.num_dropped};
  publish_kept_counts(member, launcher, record, route);
  return {route.head.num_recv_rows, route.head.num_dropped};
}

void find_endings(const Member& member, Launcher& launcher, std::uint64_t index) {
  for (SessionPort::Orphan& orphan : member.session->orphans()) {
    const abi::InflightRecord& record = orphan.record;
    if (record.member == member.number && record.op_index == index && is_sound(member, record))
      orphan.ending = found_ending(member, launcher, record);
  }
}

// Whether sums of other nodes come after `arrived`.
bool sums_come(const Member& member, Launcher& launcher, std::uint64_t index) {
  return member.group.far != nullptr &&
         announced(member, launcher, index).op == static_cast<std::uint32_t>(Op::kCombine);
}

// Whether the former engine had not answered it.
bool is_orphan(const Member& member, std::uint64_t index) {
  if (member.session == nullptr) return false;
  const std::vector<SessionPort::Orphan>& all = member.session->orphans();
  return std::any_of(all.begin(), all.end(), [&](const SessionPort::Orphan& orphan) {
    return orphan.record.member == member.number && orphan.record.op_index == index;
  });
}

// The ending of an operation that the former engine had seen end, as far as it was published.
SessionPort::Ending told_ending(const Member& member, const abi::InflightRecord& record) {
  SessionPort::Ending ending;
  const abi::BoardSlot& slot = member.board().slots[record.slot];
  if (slot.counts_ticket == record.ticket) ending.num_recv_rows = slot.num_recv_rows;
  if (!member.group.ranks.empty()) ending.num_dropped = member.saved_dropped(record.route);
  return ending;
}

// Whether the former engine has answered the member's first operation that it had not completed: with a
// failure, as the board would be past it otherwise. Then all that came behind it has failed too, and must be
// done again: sums of other nodes may be missing although every rank has arrived.
bool has_failed(const Member& member, std::uint64_t begun) {
  return member.group.far != nullptr && member.session != nullptr && member.next_number < begun &&
         !is_orphan(member, member.next_number);
}

}  // namespace

// The member begins where its board says. The board follows what an engine has looked at, so it may be far
// behind what the device has done: there may be entries in the journal, or operations that were in flight.
// Other ranks may have continued meanwhile. If the group went on from the board's number, they would need
// routings that their later dispatches have overwritten in both halves of their records. All operations
// before the last one that a rank has announced have ended, and peers have begun at most one more.
void catch_up(Member& member, Launcher& launcher) {
  if (member.lane == nullptr) return;
  const std::uint64_t begun = last_begun(member, launcher);
  if (member.calls != nullptr) {  // a call that fails is the last to begin
    member.next_number = std::max(member.next_number, begun);
  } else if (!has_failed(member, begun)) {
    const auto has_ended = [&](std::uint64_t index) {
      const std::uint64_t tag = abi::op_tag(member.group.epoch, member.group.in_tags(index));
      return index < begun && all_arrived(member, launcher, index, tag) &&
             !(sums_come(member, launcher, index) && is_orphan(member, index));
    };
    for (; has_ended(member.next_number); ++member.next_number)
      find_endings(member, launcher, member.next_number);
  }
  member.publish_next_index();
}

// Every rank has completed operations below resume_index. The former engine died before it could say so.
// Nobody will repeat them, so they have succeeded.
void answer_orphans(Member& member) {
  if (member.session == nullptr) return;
  const abi::Break& cause = member.group.cause;
  std::erase_if(member.session->orphans(), [&](const SessionPort::Orphan& orphan) {
    if (orphan.record.member != member.number) return false;
    abi::Completion completion = completion_of(orphan.record, cause.cause);
    completion.op_index = orphan.record.op_index == kUnnumbered ? 0 : orphan.record.op_index;
    completion.failed_rank = cause.failed_rank;
    const bool sound = is_sound(member, orphan.record);
    if (sound && orphan.record.op_index < member.group.resume_index) {
      const SessionPort::Ending ending = orphan.ending ? *orphan.ending : told_ending(member, orphan.record);
      completion.status = StatusCode::kOk;
      completion.failed_rank = -1;
      completion.num_recv_rows = ending.num_recv_rows;
      completion.num_dropped_selections = ending.num_dropped;
    } else if (sound) {
      member.publish_message(orphan.record.slot, orphan.record.ticket,
                             std::string(cause.text, abi::text_length(cause.text)));
    }
    count_ended(member, Op::kNone, completion);
    member.session->complete(completion);
    return true;
  });
}

}  // namespace epd::engine
