#include "failures.h"

#include "announcement.h"
#include "device_operation.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace epd::engine {

using device::Launcher;
using kernels::OpError;
using kernels::OpResult;

namespace {

std::string operation(const Subject& subject) {
  return "operation " + std::to_string(subject.index);
}

// The device reports values in 32 bits. A larger one is read from the inputs, if it is still there.
std::int64_t refused_value(const Subject& subject, Launcher& launcher, const OpResult& result) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const abi::GroupShape& shape = subject.member.group.shape;
  if (result.value != kMost || shape.index_type != abi::IndexType::kInt64) return result.value;
  std::int64_t value = 0;
  const std::size_t place = std::size_t{result.token} * shape.topk + result.k;
  const std::byte* idx = subject.member.user(subject.call.slot, abi::Region::kTopkIdx);
  launcher.read(&value, idx + place * sizeof(value), sizeof(value));
  return value >= kMost ? value : result.value;
}

// Names the field and the announcement that differ, from a copy of the block.
std::string disagreement_text(const Subject& subject, Launcher& launcher) {
  const Group& group = subject.member.group;
  std::vector<abi::OpAnnouncement> all(group.shape.num_ranks);
  launcher.read(all.data(), own_block(subject.member, subject.index) + group.exchange_layout.announcement,
                all.size() * sizeof(all[0]));
  const auto found = disagreement(all, subject.member.rank, subject.index, group.active_since);
  return found ? found->text
               : operation(subject) +
                     ": another rank submitted something else; all ranks must "
                     "submit the same operations in the same order";
}

Failure choice_failure(const Subject& subject, Launcher& launcher, const OpResult& result) {
  const Member& member = subject.member;
  return {StatusCode::kInvalidArgument, static_cast<std::int32_t>(member.rank),
          operation(subject) + ": topk_idx[" + std::to_string(result.token) + "," + std::to_string(result.k) +
              "] is " + std::to_string(refused_value(subject, launcher, result)) + " on rank " +
              std::to_string(member.rank) + "; allowed: 0 .. " +
              std::to_string(member.group.shape.num_experts - 1) + ", or a negative number: no selection"};
}

Failure placement_failure(const Subject& subject, const OpResult& result) {
  const std::string where = result.expert < 0 ? "" : " for expert " + std::to_string(result.expert);
  return {StatusCode::kResourceExhausted, result.failed_rank,
          operation(subject) + ": rank " + std::to_string(result.failed_rank) + " would receive " +
              std::to_string(result.rows) + " rows" + where +
              "; allowed: max_recv_rows = " + std::to_string(result.room)};
}

}  // namespace

void log_failure(const Member& member, abi::Op op, std::uint64_t index, const Failure& failure) {
  const bool left = member.stopped() || member.session == nullptr;
  member.group.failures.log(left ? LogLevel::kInfo : LogLevel::kWarning, "operation failed",
                            {{"group", member.group.id},
                             {"name", member.group.name},
                             {"rank", member.rank},
                             {"op", op_name(op)},
                             {"index", index},
                             {"status", status_name(failure.cause)},
                             {"failed_rank", failure.failed_rank},
                             {"cause", failure.text}});
}

abi::Break as_break(const Group& group, const Failure& failure) {
  abi::Break all{};
  all.group_id = group.id;
  all.epoch = group.epoch;
  all.cause = failure.cause;
  all.failed_rank = failure.failed_rank;
  abi::set_text(all.text, failure.text.data(), failure.text.size());
  return all;
}

std::string ended_after(const Subject& subject, std::uint64_t ms) {
  return operation(subject) + " (" + op_name(subject.call.op) + ", slot " +
         std::to_string(subject.call.slot) + ") of rank " + std::to_string(subject.member.rank) +
         " ended after " + std::to_string(ms) + " ms";
}

Failure changed_group_failure(const Subject& subject, const std::string& routing,
                              std::uint64_t routing_epoch) {
  return {StatusCode::kNotFound, -1,
          operation(subject) + ": " + routing + " is of epoch " + std::to_string(routing_epoch) +
              ", and ranks were lost or joined in epoch " +
              std::to_string(subject.member.group.changed_epoch) +
              "; allowed: a new routing, or one made since"};
}

std::string awaited_text(const Group& group, std::uint32_t rank, std::uint64_t still_ms,
                         const std::string& else_text) {
  const std::string where = group.is_near(rank) ? "" : " on " + group.far->node_name(rank);
  if (still_ms == 0) return "rank " + std::to_string(rank) + where + " " + else_text;
  return "the engine of rank " + std::to_string(rank) + " has not responded for " + std::to_string(still_ms) +
         " ms: it is stopped, or held up";
}

namespace {

// Which rank is late, where the device found `found` missing. Kernels do not look at `called`: a rank that
// has called may wait for another one. Among the missing ranks, one whose engine is stopped comes first: the
// others may have called, and their engines have not taken it.
std::uint32_t late_rank(const Subject& subject, Launcher& launcher, std::uint32_t found, std::uint64_t now_ns,
                        std::uint64_t bell_ns) {
  const Member& member = subject.member;
  const Group& group = member.group;
  const bool by_inboxes = group.exchange_layout.inbox_bytes != 0 && group.shape.per_expert();
  device::SignalCopy signals(group.shape.num_ranks, 1, by_inboxes);
  launcher.read(signals.lines().data(), own_block(member, subject.index) + group.exchange_layout.ready,
                signals.lines().size_bytes());
  const std::uint64_t tag = abi::op_tag(group.epoch, group.in_tags(subject.index));
  const device::SignalledOperation op{member.rank, tag, 0, group.masked, ranks_together(member)};
  const std::uint32_t first = signals.awaited(op, 0);
  if (first == device::SignalCopy::kNobody) return found;
  for (std::uint32_t rank = first; rank != device::SignalCopy::kNobody;
       rank = signals.awaited(op, rank + 1)) {
    if (group.stands_still_ms(rank, now_ns, bell_ns) != 0) return rank;
  }
  return first;
}

}  // namespace

Failure device_failure(const Subject& subject, Launcher& launcher, const OpResult& result,
                       const std::string& ended_after, std::uint64_t now_ns) {
  switch (result.error) {
    case OpError::kBadChoice: return choice_failure(subject, launcher, result);
    case OpError::kNoRoom: return placement_failure(subject, result);
    case OpError::kMismatch:
      return {StatusCode::kInvalidArgument, result.failed_rank, disagreement_text(subject, launcher)};
    default: break;
  }
  std::string why =
      subject.member.lane->by_kernels() ? "its inputs were not ready" : "its own rows were still moving";
  std::int32_t failed_rank = result.failed_rank;
  if (failed_rank >= 0) {
    // A host device has rung the others when it began.
    const bool rung = !subject.member.lane->by_kernels();
    const std::uint64_t bell_ns = rung ? now_ns - std::min(now_ns, result.ran_ns) : 0;
    const std::uint32_t rank =
        late_rank(subject, launcher, static_cast<std::uint32_t>(failed_rank), now_ns, bell_ns);
    failed_rank = static_cast<std::int32_t>(rank);
    why = awaited_text(subject.member.group, rank,
                       subject.member.group.stands_still_ms(rank, now_ns, bell_ns), "has not got as far");
  }
  return {StatusCode::kDeadlineExceeded, failed_rank, ended_after + ": " + why};
}

std::byte* own_block(const Member& member, std::uint64_t index) {
  return member.exchange() +
         member.group.exchange_layout.block(member.group.in_tags(index), member.group.shape.depth);
}

}  // namespace epd::engine
