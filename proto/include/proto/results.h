// How calls have ended and what dispatches have counted, for the CPU of the client that made them. In memory
// of the host: the engine's kernels write it, the client reads it, and nobody is in between. Plain data, also
// for device code.
#pragma once

#include "proto/exchange.h"
#include "proto/shape.h"

#include <cstddef>
#include <cstdint>

namespace epd::abi {

// Where the results of calls lie. The library hands the places out in turn: one for each call, and in another
// range one for each call that a graph captures, whose replays all end there.
inline constexpr std::uint32_t kOnceResults = 1024;
inline constexpr std::uint32_t kReplayedResults = 8192;
inline constexpr std::uint32_t kResultPlaces = kOnceResults + kReplayedResults;

// A call names its result in 19 bits: the place, and how often the library had come round to it.
inline constexpr std::uint32_t kResultPlaceBits = 14;
inline constexpr std::uint32_t kResultLaps = 32;
constexpr std::uint32_t result_of(std::uint32_t place, std::uint32_t lap) {
  return lap % kResultLaps << kResultPlaceBits | place;
}
constexpr std::uint32_t place_of(std::uint32_t result) {
  return result & ((1u << kResultPlaceBits) - 1);
}
static_assert(kResultPlaces <= 1u << kResultPlaceBits);

enum class CallEnding : std::uint32_t {
  kCarriedOut = 0,
  kFailed = 1,     // or was refused: the group breaks, and its board says why
  kDiscarded = 2,  // nothing was done: the group was stopped, or was of another epoch
};

struct CallEnd {
  std::uint32_t result = 0;  // of the call
  CallEnding ending = CallEnding::kCarriedOut;
  std::uint32_t num_recv_rows = 0;
  std::uint32_t num_dropped = 0;  // selections of ranks that are not active
  std::uint64_t index = 0;        // the operation's number in the group; of a noop: the next one's
  std::uint32_t ran_us = 0;       // on the device; 0: not known
  std::uint32_t runs = 0;         // calls with this result that have ended so far, this one included
};

// As it lies in its place: words that have the number of the writing in their upper half, each stored at
// once. So a reader can tell whether all are of one writing. The number is not 0.
struct alignas(64) CallResult {
  // Half is written at the end of the operation, half at the conclusion of the call.
  enum Word : std::uint32_t { kEnding, kRows, kDropped, kRan, kResult, kIndexLow, kIndexHigh, kRuns, kWords };
  std::uint64_t words[kWords];
};
static_assert(sizeof(CallResult) == 64);

// False: `words` are not all of one writing, or nothing has been written.
constexpr bool read_result(const std::uint64_t (&words)[CallResult::kWords], CallEnd& end) {
  const std::uint64_t number = words[0] >> 32;
  for (const std::uint64_t word : words) {
    if (number == 0 || word >> 32 != number) return false;
  }
  const auto low = [&](CallResult::Word word) { return static_cast<std::uint32_t>(words[word]); };
  end.result = low(CallResult::kResult);
  end.ending =
      low(CallResult::kEnding) <= 2 ? static_cast<CallEnding>(low(CallResult::kEnding)) : CallEnding::kFailed;
  end.num_recv_rows = low(CallResult::kRows);
  end.num_dropped = low(CallResult::kDropped);
  end.index = std::uint64_t{low(CallResult::kIndexHigh)} << 32 | low(CallResult::kIndexLow);
  end.ran_us = low(CallResult::kRan);
  end.runs = low(CallResult::kRuns);
  return true;
}

struct Results {
  // Calls of the host that have ended (CallWords::host_calls), cyclic.
  alignas(64) std::uint32_t host_ended;
  // For each buffer slot: the result + 1 of the last call with kFlagDefer whose inputs are read no more.
  alignas(64) std::uint32_t sent[kMaxDepth];
  CallResult places[kResultPlaces];
  // Then follow for each slot the counts of its last dispatch: placement_words(), each in 64 bits with the
  // call's result + 1 in the upper half. See ResultsLayout
};

struct ResultsLayout {
  std::uint64_t counts = sizeof(Results);
  std::uint64_t counts_stride = 0;  // bytes per slot
  std::uint64_t total_bytes = 0;

  constexpr explicit ResultsLayout(const GroupShape& s) {
    counts_stride = align_up(placement_words(s) * sizeof(std::uint64_t), 64);
    total_bytes = counts + counts_stride * s.depth;
  }
};

// Where a client finds in a placement what it asks for.
struct PlacementParts {
  std::uint64_t rank_offsets = 0;
  std::uint64_t expert_counts = 0;
  std::uint64_t expert_offsets = 0;  // if per_expert
  std::uint64_t words = 0;

  constexpr explicit PlacementParts(const GroupShape& s) {
    rank_offsets = s.per_expert() ? s.num_experts : s.num_ranks;
    expert_counts = rank_offsets + s.num_ranks + 1;
    expert_offsets = expert_counts + s.experts_per_rank();
    words = placement_words(s);
  }
};

}  // namespace epd::abi
