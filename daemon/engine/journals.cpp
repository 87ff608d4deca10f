#include "journals.h"

#include "base/log.h"
#include "break_request.h"
#include "calls.h"
#include "failures.h"

#include <algorithm>

namespace epd::engine {

using kernels::OpError;

namespace {

constexpr std::uint64_t kBusyNs = 100'000'000;     // for so long after a call, others are expected
constexpr std::uint64_t kBusyLookNs = 1'000'000;   // no bell rings for what a call has done, and nobody
constexpr std::uint64_t kIdleLookNs = 20'000'000;  // waits for it; a journal does not fill up in that time
constexpr std::uint64_t kHaltingLookNs = 50'000;
constexpr std::uint64_t kGraceNs = 100'000'000;  // see halt_lost

}  // namespace

bool Journals::read() {
  if (busy_) count(page_->busy_ns, clock_.round_ns() - last_round_ns_);
  last_round_ns_ = clock_.round_ns();
  bool progress = false;
  for (Member* member : members_) progress |= read(*member);
  busy_ = std::any_of(members_.begin(), members_.end(), [](const Member* member) {
    return member->calls != nullptr && member->calls->is_running();
  });
  return progress;
}

void Journals::read(const Group& group) {
  for (const auto& member : group.members) read(*member);
}

bool Journals::read(Member& member) {
  if (member.calls == nullptr) return false;
  Calls& calls = *member.calls;
  bool progress = false;
  while (const kernels::JournalEntry* entry = calls.front()) {
    calls.last_end_ns = clock_.round_ns();
    read_entry(member, *entry);
    calls.pop(clock_.round_ns());
    progress = true;
  }
  if (member.group.life.is_active() && !member.stopped() && member.failed_from == kNoFailure) {
    calls.look(page_, clock_.round_ns());
    break_overdue(member);
  } else if (member.failed_from == kNoFailure) {  // else what has failed is shown
    calls.show_none();
  }
  return progress;
}

void Journals::read_entry(Member& member, const kernels::JournalEntry& entry) {
  Calls& calls = *member.calls;
  if (const std::string why = calls.illegal(entry); !why.empty()) {
    if (member.session != nullptr && !member.session->ended()) sessions_.end(*member.session, why);
    return;
  }
  const abi::Call call = abi::unpack(entry.call);
  const abi::Op op = call.op;
  count(page_->ops_submitted);
  count_taken(member, op);
  StatusCode status = StatusCode::kOk;
  const bool done = entry.result.error == OpError::kNone;
  if (done && op != abi::Op::kNoop) {
    member.next_number = calls.index_of(entry) + 1;
    member.publish_next_index();
    renew_numbers(member, link_);
    count_rows(page_, member, op, call.flags, calls.rows_of(entry));
    count_ran(member, static_cast<std::uint32_t>(std::min<std::uint64_t>(entry.result.ran_ns / 1000, ~0u)));
    if (member.lane->by_kernels()) count(page_->busy_ns, entry.result.ran_ns);
  } else if (entry.result.error == OpError::kNotBegun) {
    status = StatusCode::kAborted;  // an earlier epoch has left it behind, and ended without it
  } else if (!done) {
    status = fail_call(member, entry);
  }
  count(done ? page_->ops_completed : page_->ops_failed);
  count_ended(member, status);
}

// A call is aborted only because its group breaks or ends, or its rank does. It fails even if every rank has
// completed it: its stream has continued, perhaps without the last rows.
StatusCode Journals::fail_call(Member& member, const kernels::JournalEntry& entry) {
  const abi::Op op = abi::unpack(entry.call).op;
  if (op == abi::Op::kNoop) return StatusCode::kAborted;
  member.next_number = member.calls->index_of(entry);
  member.failed_from = std::min(member.failed_from, member.next_number);
  if (entry.result.error == OpError::kAborted) {
    const abi::Break& cause = member.group.cause;
    const Failure why =
        member.group.life.is_active()
            ? Failure{StatusCode::kAborted, -1, "the rank leaves"}
            : Failure{cause.cause, cause.failed_rank, std::string(cause.text, abi::text_length(cause.text))};
    log_failure(member, op, member.next_number, why);
    return why.cause;
  }
  const Failure failure = member.calls->failure(entry, clock_.round_ns());
  log_failure(member, op, member.next_number, failure);
  request_break(member.group, as_break(member.group, failure), link_);
  return failure.cause;
}

void Journals::break_overdue(const Member& member) {
  const std::optional<Failure> failure = member.calls->overdue(clock_.round_ns());
  if (!failure || !member.group.life.may(GroupPhase::kAsking)) return;
  log_event(LogLevel::kWarning, "a call has not begun in its time",
            {{"group", member.group.id}, {"rank", member.rank}, {"reason", failure->text}});
  request_break(member.group, as_break(member.group, *failure), link_);
}

void Journals::halt_lost() {
  for (const Member* member : members_) {
    const Group& group = member->group;
    if (!group.life.is(GroupPhase::kLosing)) continue;
    const std::uint64_t since = std::max(group.broken_ns, member->calls->last_end_ns);
    // The calls that kernels have begun are not known.
    const bool over = member->calls->by_kernels() && clock_.round_ns() >= since + kGraceNs;
    if (member->next_index() >= group.cause.fail_from || member->failed_from != kNoFailure || over)
      member->calls->halt();
  }
}

bool Journals::pending() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member* member) { return member->calls->front() != nullptr; });
}

std::uint64_t Journals::next_look_ns(std::uint64_t now_ns) const {
  std::uint64_t next = kNever;
  for (const Member* member : members_) {
    if (!member->calls->by_kernels()) {
      next = std::min(next, member->calls->next_look_ns());
      continue;
    }
    const bool halting = member->group.life.awaits_device() || member->stopped();
    const bool busy = now_ns < member->calls->last_end_ns + kBusyNs;
    const std::uint64_t wait_ns = busy ? kBusyLookNs : kIdleLookNs;
    next = std::min(next, now_ns + (halting ? kHaltingLookNs : wait_ns));
  }
  return next;
}

}  // namespace epd::engine
