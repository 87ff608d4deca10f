// Turns submissions in a session's ring into operations. Each is copied once, and the copy is validated. Two
// kinds are answered here without an operation: noops, and submissions that are refused.
#pragma once

#include "operations.h"
#include "sessions.h"

#include <cstdint>
#include <string>

namespace epd::engine {

class Admission {
 public:
  Admission(Sessions& sessions, Operations& operations, Page& page, const RoundClock& clock)
      : sessions_(sessions), operations_(operations), page_(page), clock_(clock) {}

  // The timeout of submissions that give none.
  void set_default_timeout(std::uint32_t timeout_ms) { default_timeout_ms_ = timeout_ms; }
  // Takes a share of the submissions in the rings. True: there was at least one.
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
  Page& page_;
  const RoundClock& clock_;
  std::uint32_t default_timeout_ms_ = 30'000;
};

}  // namespace epd::engine
