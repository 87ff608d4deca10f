// Why an operator did something, in words that clients, logs and other operators get to read.
#pragma once

#include "common/status.h"

#include <string>

namespace epd::supervisor {

inline constexpr std::size_t kMaxReasonBytes = 160;  // a client's message has room for it

// INVALID_ARGUMENT unless it is UTF-8 of at most kMaxReasonBytes without control characters, line breaks and
// marks that turn the direction of text: nobody's terminal or log shall show what was not said.
Status check_reason(const std::string& reason);

}  // namespace epd::supervisor
