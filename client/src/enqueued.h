// What libepd's kernels are launched with. Plain data, also for device code.
#pragma once

#include "proto/call_words.h"

#include <cstdint>

namespace epd::stream_kernels {

// What of a call is known when it is put in a stream: all but number and epoch.
struct Enqueued {
  abi::Call call;
  std::uint32_t waits;
  const std::uint32_t* num_tokens_at;  // not null: in place of call.num_tokens
  std::uint64_t limit_ns;
};

}  // namespace epd::stream_kernels
