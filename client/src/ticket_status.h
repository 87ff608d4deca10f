// Statuses about tickets, the same for submissions and calls.
#pragma once

#include "deadline.h"
#include "proto/operation.h"
#include "proto/shape.h"

#include <string>

namespace epd::client {

inline bool for_ever(std::int32_t timeout_ms) {
  return timeout_ms == 0 || timeout_ms == EPD_FOREVER;
}

// How long after its own deadline a wait with EPD_FOREVER waits for an operation's end. In this time the
// group agrees, and a hanging engine is replaced. Only a stopped engine takes longer, or a group that spans
// nodes while its coordinator is away.
inline constexpr std::chrono::milliseconds kAnswerGrace{5'000};

inline Status unknown_ticket(epd_ticket_t ticket) {
  return not_found("ticket " + std::to_string(ticket) +
                   " is not in flight in this group: never issued, or retired already");
}
inline Status of_another_group(epd_ticket_t ticket) {
  return not_found("ticket " + std::to_string(ticket) + " is of another group of this session");
}
// For a call, whose result may have been replaced.
inline Status unknown_call(epd_ticket_t ticket) {
  return not_found("ticket " + std::to_string(ticket) +
                   " is not known in this group: never issued, retired already, or more than 1024 (captured: "
                   "8192) operations ago");
}

inline Status not_yet(epd_ticket_t ticket, std::int32_t timeout_ms, const char* what, abi::Span span) {
  const std::string text = "ticket " + std::to_string(ticket) + " " + what;
  if (timeout_ms == EPD_NO_WAIT) return would_block(text + " yet");
  if (for_ever(timeout_ms)) {
    const char* why = span == abi::Span::kCluster
                          ? "an engine, or the cluster's coordinator, does not answer: epctl op tells which."
                          : "its engine does not answer, is it stopped?";
    return {StatusCode::kDeadlineExceeded, text + " though its own deadline passed " +
                                               std::to_string(kAnswerGrace.count()) + " ms ago: " + why +
                                               " The ticket stays valid"};
  }
  return {StatusCode::kDeadlineExceeded, text + " within " + std::to_string(timeout_ms) + " ms"};
}

inline Status no_dispatch(epd_ticket_t ticket, abi::Op op) {
  return invalid_argument("ticket " + std::to_string(ticket) + " is of a " +
                          (op == abi::Op::kCombine ? "combine" : "noop") +
                          "; allowed: tickets of a dispatch");
}
inline Status not_in_stream(epd_ticket_t ticket) {
  return invalid_argument("ticket " + std::to_string(ticket) +
                          " is of an operation with EPD_NO_STREAM; allowed: those submitted in a stream");
}
inline Status copied_elsewhere(epd_ticket_t ticket) {
  return invalid_argument(
      "ticket " + std::to_string(ticket) +
      " is of an operation with memory, whose outputs another stream copies; allowed: once, "
      "with defer_receive. Let this stream wait for that one by an event");
}
inline Status not_deferred(epd_ticket_t ticket) {
  return invalid_argument("ticket " + std::to_string(ticket) +
                          " is of an operation without defer_receive; allowed: those submitted with it");
}
inline Status counts_replaced(epd_ticket_t ticket, std::uint32_t slot) {
  return not_found("the counts of ticket " + std::to_string(ticket) + " were replaced by a later " +
                   "operation on slot " + std::to_string(slot));
}

}  // namespace epd::client
