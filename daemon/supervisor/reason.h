// The reason of an operator's command. Clients, logs and other operators read it.
#pragma once

#include "common/status.h"

#include <string>

namespace epd::supervisor {

inline constexpr std::size_t kMaxReasonBytes = 160;  // a client's message has space for it

// INVALID_ARGUMENT unless it is UTF-8 of at most kMaxReasonBytes without control characters, line breaks and
// marks that turn the direction of text. So no terminal or log shows what was not said.
Status check_reason(const std::string& reason);

}  // namespace epd::supervisor
