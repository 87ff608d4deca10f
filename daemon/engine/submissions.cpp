// Engine: from a slot in a session's ring to an operation, and back to a completion.

#include "base/log.h"
#include "commands.h"
#include "engine.h"

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
    if (end == 0) end = now_ns_ + kShareNs;
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

namespace {

std::string bad_field(const char* field, std::uint64_t value, const std::string& allowed) {
  return "submission field " + std::string(field) + " is " + std::to_string(value) + "; allowed: " + allowed;
}

std::uint32_t flags_of(Op op) {
  if (op == Op::kDispatch) return abi::kDispatchFlags;
  return op == Op::kCombine ? std::uint32_t{abi::kCombineFlags} : std::uint32_t{abi::kNoopFlags};
}

// What can be said without knowing what else is in flight.
std::string illegal_in_shape(const Submission& s, const abi::GroupShape& shape) {
  if (s.slot >= shape.depth) return bad_field("slot", s.slot, "0 .. " + std::to_string(shape.depth - 1));
  const std::uint32_t allowed_flags = flags_of(s.op);
  if ((s.flags & ~allowed_flags) != 0) {
    return bad_field("flags", s.flags, "the bits of " + std::to_string(allowed_flags));
  }
  const std::uint32_t biases = (s.flags & abi::kFlagBiases) >> abi::kBiasShift;
  if (biases > shape.num_biases) {
    return bad_field("biases in flags", biases, "0 .. " + std::to_string(shape.num_biases));
  }
  const bool routes = s.op == Op::kDispatch && (s.flags & abi::kFlagCached) == 0;
  if (s.num_tokens > (routes ? shape.max_tokens : 0)) {
    return bad_field("num_tokens", s.num_tokens,
                     routes ? "0 .. " + std::to_string(shape.max_tokens) : "0, the routing's own counts");
  }
  if (s.route >= shape.num_routes()) {
    return bad_field("route", s.route, "0 .. " + std::to_string(shape.num_routes() - 1));
  }
  if (routes && s.route < shape.depth && s.route != s.slot) {
    return bad_field("route", s.route,
                     "the slot, " + std::to_string(s.slot) + ", or one from " + std::to_string(shape.depth));
  }
  if (std::any_of(std::begin(s.reserved), std::end(s.reserved), [](std::uint32_t r) { return r != 0; })) {
    return "submission field reserved is not zero";
  }
  return "";
}

}  // namespace

// What no correct client library writes; "" if there is nothing of the kind.
std::string Engine::illegal(const SessionPort& session, const Submission& s) const {
  if (s.ticket == 0) return bad_field("ticket", s.ticket, "not 0");
  if (s.op != Op::kNoop && s.op != Op::kDispatch && s.op != Op::kCombine) {
    return bad_field("op", static_cast<std::uint32_t>(s.op), "1 (noop), 2 (dispatch), 3 (combine)");
  }
  const auto found = session.members.find(s.member);
  if (found == session.members.end()) {
    return bad_field("member", s.member, "a group that this session has joined");
  }
  const Member& member = *found->second;
  if (std::string why = illegal_in_shape(s, member.group.shape); !why.empty()) return why;
  if ((s.flags & abi::kFlagStream) != 0 && device_->launcher() == nullptr) {
    return bad_field("flags", s.flags, "no stream's on " + device_->name());
  }
  const bool records = (s.flags & abi::kFlagRecord) != 0;
  const bool plain_noop = s.op == Op::kNoop && (s.flags & abi::kFlagStream) == 0;
  if (records != member.by_stream && !(member.by_stream && plain_noop)) {
    return bad_field("flags", s.flags,
                     member.by_stream ? "with kFlagRecord, since this rank's operations are commands"
                                      : "without kFlagRecord, since this rank's operations are no commands");
  }
  if (records && member.commands != nullptr) {
    if (std::string why = member.commands->refuses(s); !why.empty()) return why;
  }
  if (s.epoch > member.group.epoch) {
    return bad_field("epoch", s.epoch, "at most " + std::to_string(member.group.epoch));
  }
  const Member::SlotUse& use = member.slot_use[s.slot];
  const bool in_order = use.of_stream && (s.flags & abi::kFlagStream) != 0;
  if (s.op != Op::kNoop && use.operations != 0 && !in_order) {
    return bad_field("slot", s.slot,
                     "one without an operation in flight (ticket " + std::to_string(use.ticket) + ")");
  }
  return "";
}

std::unique_ptr<Operation> Engine::make_operation(Member& member, const abi::Submission& submission,
                                                  std::uint64_t deadline_ns) {
  if (Launcher* launcher = device_->launcher(); launcher != nullptr)
    return std::make_unique<LaunchedOperation>(member, submission, now_ns_, deadline_ns, *launcher, page_);
  return std::make_unique<MovedOperation>(member, submission, now_ns_, deadline_ns, *device_->mover(), page_);
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
  if ((submission.flags & abi::kFlagRecord) != 0) {
    record(session, submission, member);
    return;
  }
  const bool is_noop = submission.op == Op::kNoop;
  if (is_noop && (submission.flags & abi::kFlagStream) == 0) {
    answer_noop(session, submission, member);
    return;
  }
  const bool stale = !is_noop && submission.epoch != group.epoch;
  if (stale || group.refuses()) {
    session.begin(submission, kUnnumbered);
    refuse(session, submission, member);
    return;
  }
  const std::uint32_t timeout_ms =
      submission.timeout_ms != 0 ? submission.timeout_ms : settings_.default_timeout_ms;
  auto operation = make_operation(member, submission, now_ns_ + std::uint64_t{timeout_ms} * 1'000'000);
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
  if (group.phase == GroupPhase::kBreaking || member.stopped) {
    count_stall(member, abi::Stall::kGroup);
    operation->abandon();
  }
  schedule_.add(session.id(), std::move(operation));
  idle_turns_ = 0;
}

// For commands to name. What is to be done again after a break is recorded after it.
void Engine::record(SessionPort& session, const Submission& submission, Member& member) {
  const Group& group = member.group;
  session.begin(submission, kUnnumbered);
  const bool starting = group.phase == GroupPhase::kStarting;  // from the ring of a former engine
  if (member.commands == nullptr || starting) {
    answer(session, submission, starting ? StatusCode::kEngineRestarted : StatusCode::kAborted);
    count(page_->ops_failed);
  } else if (group.phase != GroupPhase::kActive || submission.epoch != group.epoch) {
    refuse(session, submission, member);
  } else {
    member.commands->record(
        submission, submission.timeout_ms != 0 ? submission.timeout_ms : settings_.default_timeout_ms);
    answer(session, submission, StatusCode::kOk);
    count(page_->ops_completed);
  }
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
      saturated_us(submission.submit_ns, now_ns_);
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
  send(abi::LinkType::kSessionFailed, failed);
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
