// The attention kernels and their host code agree on these numbers.
#pragma once

#include <cstdint>

namespace epd::bench {

inline constexpr std::uint32_t kHeadSize = 128;  // values of a head
inline constexpr std::uint32_t kAttentionThreads = 256;

// Decode: a CTA reads so many tokens of one head of one sequence; a sequence's length is a multiple.
inline constexpr std::uint32_t kSplitTokens = 512;

// Prefill: queries of a CTA, of which each warp has 16, and keys that are in shared memory at a time. The
// number of tokens is a multiple of both.
inline constexpr std::uint32_t kQueries = 128;
inline constexpr std::uint32_t kKeys = 32;

inline constexpr std::uint32_t kRandomThreads = 256;
inline constexpr std::uint32_t kRandomCtas = 1024;

}  // namespace epd::bench
