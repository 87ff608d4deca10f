// The arguments of libepd's kernels. Plain data, also for device code.
#pragma once

#include "proto/call_words.h"

#include <cstdint>

namespace epd::stream_kernels {

// The parts of a call that are known when it is enqueued: all but number and epoch.
struct Enqueued {
  abi::Call call;
  std::uint32_t waits;
  const std::uint32_t* num_tokens_at;  // not null: in place of call.num_tokens
  std::uint64_t limit_ns;
};

}  // namespace epd::stream_kernels
