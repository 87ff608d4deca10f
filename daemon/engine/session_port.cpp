#include "session_port.h"

#include <algorithm>
#include <utility>

namespace epd::engine {

using abi::SegmentA;
using abi::SegmentB;

Result<std::unique_ptr<SessionPort>> SessionPort::open(std::uint64_t id, Ends ends) {
  Result<Mapping> a = Mapping::map(ends.segment_a.get(), sizeof(SegmentA), Access::kReadWrite);
  if (!a.ok()) return a.status();
  Result<Mapping> b = Mapping::map(ends.segment_b.get(), sizeof(SegmentB), Access::kReadWrite);
  if (!b.ok()) return b.status();
  std::unique_ptr<SessionPort> port(new SessionPort);
  port->id_ = id;
  port->ring_client_ = std::move(ends.ring_client);
  port->a_mapping_ = std::move(a).value();
  port->b_mapping_ = std::move(b).value();
  port->a_ = port->a_mapping_.as<SegmentA>();
  port->b_ = port->b_mapping_.as<SegmentB>();
  port->adopt();
  return port;
}

void SessionPort::adopt() {
  inherited_ = b_->incarnation.fetch_add(1, std::memory_order_relaxed) != 0;
  awaits_groups_ = inherited_;
  head_ = b_->submission_head.value.load(std::memory_order_relaxed);
  tail_ = b_->completion_tail.value.load(std::memory_order_relaxed);
  // The former engine may have died between publishing a completion and counting it.
  auto& slot = b_->completions.slots[tail_ % abi::kCompletionSlots];
  if (std::atomic_ref(slot.sequence).load(std::memory_order_relaxed) == tail_ + 1) {
    b_->completion_tail.value.store(++tail_, std::memory_order_relaxed);
  }
  for (const abi::InflightRecord& record : b_->inflight) {
    if (record.ticket != 0) orphans_.push_back({record, {}});
  }
  // As they were submitted: what is released for one may not take back what was released for a later one.
  std::sort(orphans_.begin(), orphans_.end(),
            [](const Orphan& a, const Orphan& b) { return a.record.ticket < b.record.ticket; });
  inflight_ = orphans_.size();
  give_back_recorded();
  set_sleeping(false);
  set_state(abi::SessionState::kServing);
  // The former engine may have died between publishing a completion and ringing for it.
  if (inherited_) ring();
}

// The former engine may have recorded an operation and died before it gave the slot back.
void SessionPort::give_back_recorded() {
  abi::Submission first;
  if (!abi::ring_peek(a_->submissions, head_, first)) return;
  const bool recorded = std::any_of(orphans_.begin(), orphans_.end(), [&first](const Orphan& orphan) {
    return orphan.record.ticket == first.ticket;
  });
  if (recorded) b_->submission_head.value.store(++head_, std::memory_order_release);
}

std::optional<abi::Submission> SessionPort::take() {
  if (ended_ || removing) return std::nullopt;
  if (!waiting_.empty()) return stall(abi::Stall::kCompletions);
  if (inflight_ >= abi::kSubmissionSlots) return stall(abi::Stall::kDepth);
  // The slot taken last is given back only now, after begin() has recorded its operation.
  b_->submission_head.value.store(head_, std::memory_order_release);
  abi::Submission submission;
  if (!abi::ring_peek(a_->submissions, head_, submission)) return std::nullopt;
  if (awaits_group(submission)) return stall(abi::Stall::kGroup);
  ++head_;
  return submission;
}

std::optional<abi::Submission> SessionPort::stall(abi::Stall why) {
  const std::uint64_t sequence =
      std::atomic_ref(a_->submissions.slots[head_ % abi::kSubmissionSlots].sequence)
          .load(std::memory_order_acquire);
  if (sequence == head_ + 1 && std::exchange(stalled_at_, head_) != head_) statistics.stalled(why);
  return std::nullopt;
}

bool SessionPort::has_submission() {
  if (ended_ || removing || !waiting_.empty() || inflight_ >= abi::kSubmissionSlots) return false;
  if (awaits_groups_) {
    abi::Submission submission;
    return abi::ring_peek(a_->submissions, head_, submission) && !awaits_group(submission);
  }
  return std::atomic_ref(a_->submissions.slots[head_ % abi::kSubmissionSlots].sequence)
             .load(std::memory_order_acquire) == head_ + 1;
}

bool SessionPort::awaits_group(const abi::Submission& submission) const {
  return awaits_groups_ && !members.contains(submission.member);
}

void SessionPort::end_member(std::uint32_t number) {
  members.erase(number);
  former_[static_cast<std::uint16_t>(number)] = {number, head_ + abi::kSubmissionSlots};
}

bool SessionPort::was_member(std::uint32_t number) const {
  const auto last = former_.find(static_cast<std::uint16_t>(number));
  return last != former_.end() && last->second.number == number && head_ <= last->second.until;
}

void SessionPort::begin(const abi::Submission& submission, std::uint64_t op_index) {
  for (abi::InflightRecord& record : b_->inflight) {
    if (record.ticket != 0) continue;
    record.op_index = op_index;
    record.submit_ns = submission.submit_ns;
    record.member = submission.member;
    record.slot = submission.slot;
    record.route = submission.route;
    std::atomic_ref(record.ticket).store(submission.ticket, std::memory_order_release);
    ++inflight_;
    break;
  }
  statistics.set_queue_depth(inflight_);
  b_->submission_head.value.store(head_, std::memory_order_release);
}

bool SessionPort::post(const abi::Completion& completion) {
  const abi::PushResult result = abi::ring_push(b_->completions, tail_, a_->completion_head, completion);
  // A corrupt index can only come from the client; it loses its completions, nobody else.
  if (result != abi::PushResult::kPushed) return false;
  b_->completion_tail.value.store(++tail_, std::memory_order_relaxed);
  for (abi::InflightRecord& record : b_->inflight) {
    if (record.ticket != completion.ticket) continue;
    std::atomic_ref(record.ticket).store(0, std::memory_order_release);
    --inflight_;
    break;
  }
  statistics.set_queue_depth(inflight_);
  return true;
}

void SessionPort::complete(const abi::Completion& completion) {
  if (!waiting_.empty() || !post(completion)) {
    waiting_.push_back(completion);
    return;
  }
  ring();
}

bool SessionPort::flush() {
  bool moved = false;
  while (!waiting_.empty() && post(waiting_.front())) {
    waiting_.pop_front();
    moved = true;
  }
  if (moved) ring();
  return moved;
}

bool SessionPort::can_flush() const {
  return !waiting_.empty() &&
         tail_ - a_->completion_head.value.load(std::memory_order_acquire) < abi::kCompletionSlots;
}

void SessionPort::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (a_->client_sleep.sleeping.load(std::memory_order_relaxed) != 0) ring_eventfd(ring_client_.get());
}

void SessionPort::end(StatusCode status, const std::string& text) {
  ended_ = true;
  abi::set_text(b_->message, text.data(), text.size());
  b_->end_status.store(static_cast<std::uint32_t>(status), std::memory_order_relaxed);
  set_state(abi::SessionState::kEnded);
  ring();
}

}  // namespace epd::engine
