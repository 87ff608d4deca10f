#include "admission.h"

#include "op_rules.h"

#include <algorithm>

namespace epd::engine {

using abi::Op;
using abi::Submission;

namespace {

// A client that submits as fast as it is answered must not keep the loop from the others, or from the
// supervisor.
constexpr int kTakesPerRound = 16;

}  // namespace

bool Admission::poll() {
  bool progress = false;
  std::uint64_t end = 0;
  for (std::size_t left = sessions_.size(); left > 0; --left) {
    if (!poll(sessions_.next())) continue;
    progress = true;
    // Not worth it for a single submission.
    if (left == 1) break;
    const std::uint64_t now = clock_.now_ns();
    if (end == 0) end = clock_.round_ns() + kShareNs;
    if (now >= end) break;
  }
  return progress;
}

bool Admission::poll(SessionPort& session) {
  bool progress = session.flush();
  for (int taken = 0; taken < kTakesPerRound; ++taken) {
    const std::optional<Submission> submission = session.take();
    if (!submission) break;
    accept(session, *submission);
    progress = true;
  }
  return progress;
}

// What a correct client library never writes; "" if the submission is legal.
std::string Admission::illegal(const SessionPort& session, const Submission& s) const {
  const auto bad = [](const char* field, std::uint64_t value, const std::string& allowed) {
    return bad_field("submission", field, value, allowed);
  };
  if (s.ticket == 0) return bad("ticket", s.ticket, "not 0");
  const abi::OpRequest request{s.op, s.slot, s.num_tokens, s.flags, s.route};
  const auto found = session.members.find(s.member);
  if (found == session.members.end()) return bad("member", s.member, "a group that this session has joined");
  const Member& member = *found->second;
  if (std::string why = refusal("submission", request, abi::op_limits(member.group.shape)); !why.empty())
    return why;
  if (std::any_of(std::begin(s.reserved), std::end(s.reserved), [](std::uint32_t r) { return r != 0; }))
    return "submission field reserved is not zero";
  if ((s.flags & abi::kFlagPlaces) != 0)
    return bad("flags", s.flags, "no places of rows: those are for calls");
  if (member.calls != nullptr)
    return bad("op", static_cast<std::uint32_t>(s.op), "none, since this rank's operations are calls");
  if (s.epoch > member.group.epoch)
    return bad("epoch", s.epoch, "at most " + std::to_string(member.group.epoch));
  const Member::SlotUse& use = member.slot_use[s.slot];
  if (s.op != Op::kNoop && use.in_flight) {
    return bad("slot", s.slot,
               "one without an operation in flight (ticket " + std::to_string(use.ticket) + ")");
  }
  return "";
}

void Admission::accept(SessionPort& session, const Submission& submission) {
  const bool former = session.inherited() || session.was_member(submission.member);
  if (submission.ticket != 0 && former && !session.members.contains(submission.member)) {
    answer_former(session, submission);
    return;
  }
  if (const std::string why = illegal(session, submission); !why.empty()) {
    sessions_.end(session, why);
    return;
  }
  Member& member = *session.members.at(submission.member);
  const Group& group = member.group;
  count(page_->ops_submitted);
  if (submission.op == Op::kNoop) {
    answer_noop(session, submission, member);
    return;
  }
  if (submission.epoch != group.epoch || group.life.refuses()) {
    refuse(session, submission, member);
    return;
  }
  session.begin(submission, member.next_number);
  operations_.start(member, submission,
                    submission.timeout_ms != 0 ? submission.timeout_ms : default_timeout_ms_);
}

// Its group ended while no engine ran, or the client submitted it while its rank left.
void Admission::answer_former(SessionPort& session, const Submission& submission) {
  session.begin(submission, kUnnumbered);
  const abi::Completion completion =
      completion_of(submission, session.was_member(submission.member) ? StatusCode::kAborted
                                                                      : StatusCode::kEngineRestarted);
  session.complete(completion);
  session.statistics.refused(completion.status);
  count(page_->ops_failed);
}

// A noop has nothing to wait for.
void Admission::answer_noop(SessionPort& session, const Submission& submission, Member& member) {
  count_taken(member, Op::kNoop);
  session.begin(submission, kUnnumbered);
  abi::Completion completion = completion_of(submission, StatusCode::kOk);
  completion.seen_us = completion.launched_us = completion.done_us =
      saturated_us(submission.submit_ns, clock_.round_ns());
  session.complete(completion);
  count_ended(member, Op::kNoop, completion);
  count(page_->ops_completed);
}

// For a group that has ended, or that is in an epoch which this client does not know yet.
void Admission::refuse(SessionPort& session, const Submission& submission, Member& member) {
  const abi::Break& cause = member.group.cause;
  session.begin(submission, kUnnumbered);
  abi::Completion completion = completion_of(submission, cause.cause);
  completion.failed_rank = cause.failed_rank;
  member.publish_message(submission.slot, submission.ticket,
                         std::string(cause.text, abi::text_length(cause.text)));
  session.complete(completion);
  count_refused(member, cause.cause);
  count(page_->ops_failed);
}

}  // namespace epd::engine
