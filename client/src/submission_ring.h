// The ring of submissions to the engine of a host device, and the engine's doorbell. With the session's
// mutex, except wake_engine().
#pragma once

#include "common/fd.h"
#include "errors.h"
#include "proto/session.h"

namespace epd::client {

class SubmissionRing {
 public:
  SubmissionRing(abi::SegmentA& a, const abi::SegmentB& b, const UniqueFd& engine_bell)
      : a_(a), b_(b), bell_(engine_bell) {}

  bool has_room() const { return waiting() < abi::kSubmissionSlots; }
  // INTERNAL if the engine's index can't be right. Otherwise sets `full` to why there is no room.
  Status check(std::string& full) const;
  bool push(const abi::Submission& submission);
  // After publishing: rings if the engine sleeps at this level or deeper.
  void wake_engine(abi::Sleep at_least) const;

 private:
  std::uint64_t waiting() const { return tail_ - b_.submission_head.value.load(std::memory_order_acquire); }

  abi::SegmentA& a_;
  const abi::SegmentB& b_;
  const UniqueFd& bell_;
  std::uint64_t tail_ = 0;
};

}  // namespace epd::client
