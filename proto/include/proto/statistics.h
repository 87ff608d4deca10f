// An engine's counts per session and per membership, in its page: written by its loop alone, with relaxed
// stores; read by anybody without a request. The rows of an engine that dies are lost with it.
#pragma once

#include "proto/operation.h"
#include "proto/status.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace epd::abi {

// Log-linear buckets of microseconds: 0, 1, 2, 3, then four for each power of two, so that a bucket is
// at most a quarter wider than its smallest value. The last takes everything above 29 seconds.
inline constexpr std::size_t kHistogramBuckets = 96;

constexpr std::size_t histogram_bucket(std::uint32_t us) {
  if (us < 4) return us;
  const auto octave = static_cast<std::size_t>(std::bit_width(us)) - 1;
  return std::min(4 * (octave - 1) + ((us >> (octave - 2)) & 3u), kHistogramBuckets - 1);
}

// The smallest value of a bucket.
constexpr std::uint64_t histogram_floor(std::size_t bucket) {
  if (bucket < 4) return bucket;
  return std::uint64_t{4 + bucket % 4} << (bucket / 4 - 1);
}

// Estimate of the value that `per_mille` of the observations do not exceed, linear within its bucket.
// 0 if there are none. `counts` has kHistogramBuckets elements.
template <typename Counts>
constexpr std::uint64_t histogram_percentile(const Counts& counts, std::uint64_t per_mille) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kHistogramBuckets; ++i) total += counts[i];
  if (total == 0) return 0;
  const std::uint64_t wanted = std::max<std::uint64_t>((total * per_mille + 999) / 1000, 1);
  std::uint64_t below = 0;
  for (std::size_t i = 0; i < kHistogramBuckets; ++i) {
    if (below + counts[i] < wanted) {
      below += counts[i];
      continue;
    }
    const std::uint64_t width = histogram_floor(i + 1) - histogram_floor(i);
    return histogram_floor(i) + width * (wanted - below - 1) / counts[i];
  }
  return histogram_floor(kHistogramBuckets - 1);
}

struct Histogram {
  std::atomic<std::uint64_t> buckets[kHistogramBuckets];
};

inline constexpr std::size_t kNumOps = 4;         // indexed by Op
inline constexpr std::size_t kStatusSlots = 16;   // indexed by StatusCode
inline constexpr std::size_t kSessionRows = 256;  // and one more, see StatisticsTable
inline constexpr std::size_t kMemberRows = 256;   // likewise
static_assert(kNumStatusCodes <= kStatusSlots);

struct StatisticsRow {
  alignas(64) std::atomic<std::uint64_t> key;  // 0 = free; another one for each owner
  std::atomic<std::uint64_t> session_id;
  std::atomic<std::uint64_t> group_id;               // memberships only
  std::atomic<std::uint32_t> rank;                   // likewise
  std::atomic<std::uint64_t> operations[kNumOps];    // taken
  std::atomic<std::uint64_t> ended[kStatusSlots];    // operations, by their status; [0] is OK
  std::atomic<std::uint64_t> refused[kStatusSlots];  // calls that ended the session
  std::atomic<std::uint64_t> bytes_dispatched;
  std::atomic<std::uint64_t> bytes_combined;
  Histogram ran;  // dispatches and combines with OK: begun by the device until done, with waits for others
};

// The row after the last is shared by all that found no row of their own: nothing is lost, only told less
// finely.
template <std::size_t Rows>
struct StatisticsTable {
  std::atomic<std::uint64_t> unlisted;  // owners that share the last row, since the engine's start
  StatisticsRow rows[Rows + 1];
};

// Adds to a counter that only the calling thread writes.
inline void count(std::atomic<std::uint64_t>& counter, std::uint64_t by = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

}  // namespace epd::abi
