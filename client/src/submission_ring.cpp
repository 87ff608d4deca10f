#include "submission_ring.h"

#include <sys/socket.h>
#include <atomic>

namespace epd::client {

Status SubmissionRing::check(std::string& full) const {
  const std::uint64_t head = b_.submission_head.value.load(std::memory_order_acquire);
  if (tail_ - head > abi::kSubmissionSlots) {
    return internal_error("the engine's submission index " + std::to_string(head) +
                          " does not fit the client's " + std::to_string(tail_));
  }
  full = "the session's ring is full: " + std::to_string(abi::kSubmissionSlots) +
         " submissions wait for the engine";
  return {};
}

bool SubmissionRing::push(const abi::Submission& submission) {
  if (abi::ring_push(a_.submissions, tail_, b_.submission_head, submission) != abi::PushResult::kPushed)
    return false;
  ++tail_;
  return true;
}

void SubmissionRing::wake_engine(abi::Sleep at_least) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (b_.engine_sleep.sleeping.load(std::memory_order_relaxed) < at_least) return;
  const char byte = 0;
  [[maybe_unused]] const ssize_t n = ::send(bell_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace epd::client
