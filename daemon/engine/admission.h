// From a slot in a session's ring to an operation: each submission is copied once, and the copy is validated.
// What is answered without an operation is answered here: noops outside of streams, and what is refused.
#pragma once

#include "device/device.h"
#include "operations.h"
#include "sessions.h"

#include <cstdint>
#include <string>

namespace epd::engine {

class Admission {
 public:
  Admission(Sessions& sessions, Operations& operations, const device::Device& device, Page& page,
            const RoundClock& clock)
      : sessions_(sessions), operations_(operations), device_(device), page_(page), clock_(clock) {}

  // Of submissions that name none.
  void set_default_timeout(std::uint32_t timeout_ms) { default_timeout_ms_ = timeout_ms; }
  // A round's share of what lies in the rings. True: there was something.
  bool poll();

 private:
  bool poll(SessionPort& session);
  void accept(SessionPort& session, const abi::Submission& submission);
  std::string illegal(const SessionPort& session, const abi::Submission& submission) const;
  void answer_former(SessionPort& session, const abi::Submission& submission);
  void answer_noop(SessionPort& session, const abi::Submission& submission, Member& member);
  void refuse(SessionPort& session, const abi::Submission& submission, Member& member);

  Sessions& sessions_;
  Operations& operations_;
  const device::Device& device_;
  Page& page_;
  const RoundClock& clock_;
  std::uint32_t default_timeout_ms_ = 30'000;
};

}  // namespace epd::engine
