// Engine: from a slot in a session's ring to an operation, and back to a completion.

#include "base/log.h"
#include "commands.h"
#include "engine.h"
#include "op_rules.h"

#include <algorithm>

namespace epd {

using abi::Op;
using abi::Submission;

namespace {

// So that a client which submits as fast as it is answered can't keep the loop from the others, nor
// from the supervisor.
constexpr int kTakesPerRound = 16;

}  // namespace

bool Engine::poll_sessions() {
  bool progress = false;
  std::uint64_t end = 0;
  for (std::size_t left = sessions_.size(); left > 0; --left) {
    auto next = sessions_.upper_bound(last_session_);
    if (next == sessions_.end()) next = sessions_.begin();
    last_session_ = next->first;
    if (!poll_session(*next->second)) continue;
    progress = true;
    // Not asked for a single submission.
    if (left == 1) break;
    const std::uint64_t now = clock_.now_ns();
    if (end == 0) end = clock_.round_ns() + kShareNs;
    if (now >= end) break;
  }
  return progress;
}

bool Engine::poll_session(SessionPort& session) {
  bool progress = session.flush();
  for (int taken = 0; taken < kTakesPerRound; ++taken) {
    const std::optional<Submission> submission = session.take();
    if (!submission) break;
    accept(session, *submission);
    progress = true;
  }
  return progress;
}

// What no correct client library writes; "" if there is nothing of the kind.
std::string Engine::illegal(const SessionPort& session, const Submission& s) const {
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
  const bool of_stream = (s.flags & abi::kFlagStream) != 0;
  if (of_stream && !device_->traits().has_streams)
    return bad("flags", s.flags, "no stream's on " + device_->name());
  if (member.commands != nullptr)
    return bad("op", static_cast<std::uint32_t>(s.op), "none, since this rank's operations are calls");
  if (s.epoch > member.group.epoch)
    return bad("epoch", s.epoch, "at most " + std::to_string(member.group.epoch));
  const Member::SlotUse& use = member.slot_use[s.slot];
  const bool in_order = use.of_stream && of_stream;
  if (s.op != Op::kNoop && use.operations != 0 && !in_order) {
    return bad("slot", s.slot,
               "one without an operation in flight (ticket " + std::to_string(use.ticket) + ")");
  }
  return "";
}

void Engine::release_stream(const Member& member, const abi::Submission& submission) {
  if ((submission.flags & abi::kFlagStream) == 0 || member.lane == nullptr || member.group.ranks.empty())
    return;
  member.lane->release(stream_signal(member, submission.slot, submission.ticket), submission.ticket);
}

void Engine::accept(SessionPort& session, const Submission& submission) {
  const bool former = session.inherited() || session.was_member(submission.member);
  if (submission.ticket != 0 && former && !session.members.contains(submission.member)) {
    // Its group ended while no engine was here, or it was submitted as its rank left.
    session.begin(submission, kUnnumbered);
    abi::Completion completion{};
    completion.ticket = submission.ticket;
    completion.status =
        session.was_member(submission.member) ? StatusCode::kAborted : StatusCode::kEngineRestarted;
    completion.culprit_rank = -1;
    completion.member = submission.member;
    completion.slot = submission.slot;
    session.complete(completion);
    session.statistics.refused(completion.status);
    count(page_->ops_failed);
    return;
  }
  if (const std::string why = illegal(session, submission); !why.empty()) {
    end_session(session, why);
    return;
  }
  Member& member = *session.members.at(submission.member);
  Group& group = member.group;
  count(page_->ops_submitted);
  const bool is_noop = submission.op == Op::kNoop;
  if (is_noop && (submission.flags & abi::kFlagStream) == 0) {
    answer_noop(session, submission, member);
    return;
  }
  const bool stale = !is_noop && submission.epoch != group.epoch;
  if (stale || group.life.refuses()) {
    session.begin(submission, kUnnumbered);
    refuse(session, submission, member);
    return;
  }
  const std::uint32_t timeout_ms =
      submission.timeout_ms != 0 ? submission.timeout_ms : settings_.default_timeout_ms;
  auto operation = std::make_unique<Operation>(member, submission, clock_.round_ns(),
                                               clock_.round_ns() + std::uint64_t{timeout_ms} * 1'000'000,
                                               device_->launcher(), page_);
  session.begin(submission, is_noop ? kUnnumbered : operation->index());
  if (!is_noop) {
    member.inflight.insert(operation->index());
    Member::SlotUse& use = member.slot_use[submission.slot];
    use = {use.operations + 1, (submission.flags & abi::kFlagStream) != 0, submission.ticket};
    ++member.next_number;
    renew_numbers(member);
  }
  count_taken(member, submission.op);
  if (abi::OpView* view = page_.claim(submission); view != nullptr) {
    view->session_id = session.id();
    view->group_id = group.id;
    view->rank = member.rank;
    view->op_index = operation->index();
    operation->show(view);
  }
  // While the group agrees on a break, or on what a lost rank leaves behind (all ranks are stopped then),
  // the operation waits with the others for its verdict.
  if (group.life.holds_back() || member.stopped()) {
    count_stall(member, abi::Stall::kGroup);
    operation->abandon();
  }
  schedule_.add(session.id(), std::move(operation));
  idle_turns_ = 0;
}

// Outside of any stream there is nothing that it could wait for.
void Engine::answer_noop(SessionPort& session, const Submission& submission, Member& member) {
  count_taken(member, Op::kNoop);
  session.begin(submission, kUnnumbered);
  count_ended(member, Op::kNoop, answer(session, submission, StatusCode::kOk));
  count(page_->ops_completed);
}

// What has no number, at once.
abi::Completion Engine::answer(SessionPort& session, const Submission& submission, StatusCode status) {
  abi::Completion completion{};
  completion.ticket = submission.ticket;
  completion.status = status;
  completion.culprit_rank = -1;
  completion.member = submission.member;
  completion.slot = submission.slot;
  completion.seen_us = completion.launched_us = completion.done_us =
      saturated_us(submission.submit_ns, clock_.round_ns());
  session.complete(completion);
  return completion;
}

// For a group that has ended or has moved to an epoch which this client does not know yet.
void Engine::refuse(SessionPort& session, const Submission& submission, Member& member) {
  const abi::Break& cause = member.group.cause;
  release_stream(member, submission);
  abi::Completion completion{};
  completion.ticket = submission.ticket;
  completion.status = cause.cause;
  completion.culprit_rank = cause.culprit_rank;
  completion.member = submission.member;
  completion.slot = submission.slot;
  member.publish_message(submission.slot, submission.ticket,
                         std::string(cause.text, abi::text_length(cause.text)));
  session.complete(completion);
  count_refused(member, cause.cause);
  count(page_->ops_failed);
}

void Engine::end_session(SessionPort& session, const std::string& text) {
  static LogLimiter limiter;
  limiter.log(LogLevel::kWarning, "illegal submission, session ended",
              {{"session", session.id()}, {"error", text}});
  count(page_->submissions_refused);
  session.statistics.refused(StatusCode::kInvalidArgument);
  session.end(StatusCode::kInvalidArgument, text);
  abi::SessionFailed failed{session.id(), StatusCode::kInvalidArgument, {}};
  abi::set_text(failed.text, text.data(), text.size());
  link_.send(abi::LinkType::kSessionFailed, failed);
}

void Engine::finish(const Operation& operation, StatusCode status, const abi::Break& cause) {
  Member& member = operation.member();
  const std::uint32_t slot = operation.submission().slot;
  if (operation.is_collective()) {
    member.inflight.erase(operation.index());
    if (status != StatusCode::kOk) member.failed_from = std::min(member.failed_from, operation.index());
    --member.slot_use[slot].operations;
    member.publish_next_index();
  }
  count(status == StatusCode::kOk ? page_->ops_completed : page_->ops_failed);
  if (status != StatusCode::kOk && !operation.releases_stream())
    release_stream(member, operation.submission());
  const abi::Completion completion =
      operation.completion(status, status == StatusCode::kOk ? -1 : cause.culprit_rank, clock_.now_ns());
  count_ended(member, operation.submission().op, completion);
  if (member.session == nullptr) return;
  if (status != StatusCode::kOk) {
    member.publish_message(slot, operation.submission().ticket,
                           std::string(cause.text, abi::text_length(cause.text)));
  }
  member.session->complete(completion);
}

}  // namespace epd
