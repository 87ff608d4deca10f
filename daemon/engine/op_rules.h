// Names the fields of requests that a correct client library never sends.
#pragma once

#include "proto/operation.h"

#include <cstdint>
#include <string>

namespace epd::engine {

// For example "call field slot is 9; allowed: 0 .. 3", where `what` is "call".
std::string bad_field(const std::string& what, const char* field, std::uint64_t value,
                      const std::string& allowed);
// The first field of a request that abi::bad_field() refuses; "" if there is none.
std::string refusal(const std::string& what, const abi::OpRequest& request, const abi::OpLimits& limits);

}  // namespace epd::engine
