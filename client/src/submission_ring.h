// The ring into which submissions are written for the engine of a launched device, and the engine's bell.
// With the session's mutex, but for wake_engine().
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
  // INTERNAL if the engine's index can't be right; else why there is no room.
  Status check(std::string& full) const;
  bool push(const abi::Submission& submission);
  // After publishing: if it sleeps, and for no less than this.
  void wake_engine(abi::Sleep at_least) const;

 private:
  std::uint64_t waiting() const { return tail_ - b_.submission_head.value.load(std::memory_order_acquire); }

  abi::SegmentA& a_;
  const abi::SegmentB& b_;
  const UniqueFd& bell_;
  std::uint64_t tail_ = 0;
};

}  // namespace epd::client
