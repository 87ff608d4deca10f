// Memory of a client's own that the engines of its group map, so that rows of calls may lie there. How a
// client asks for that, and what is allowed. Plain data.
#pragma once

#include "proto/row_place.h"
#include "proto/wire.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace epd::abi {

// How an engine reaches an allocation.
enum class MemoryBy : std::uint32_t {
  kNothing = 0,     // it does not any more
  kDescriptor = 1,  // as cuMemExportToShareableHandle gives for memory of cuMemCreate, one for each piece
  kIpcHandle = 2,   // CUipcMemHandle, of memory of cudaMalloc
};

inline constexpr std::size_t kIpcHandleBytes = 64;
inline constexpr std::uint64_t kMaxMappedBytes = std::uint64_t{1} << 50;
// Adjacent allocations of one size that are mapped as one: torch's expandable segments consist of such
// pieces.
inline constexpr std::uint32_t kMaxPieces = 20;
static_assert(kMaxPieces <= kMaxMessageFds);

struct MemoryRange {
  std::uint32_t number = 0;      // of the memory, in row places
  std::uint32_t generation = 0;  // never one that the number had before
  MemoryBy by = MemoryBy::kNothing;
  std::uint32_t pieces = 1;
  std::uint64_t offset = 0;  // of the range in its allocation; a multiple of kRowPlaceAlign
  std::uint64_t bytes = 0;
  std::uint64_t whole = 0;  // bytes of the allocation, or of its pieces, which is mapped as a whole
  std::uint64_t id = 0;     // of the allocation, as its process knows it; never that of another one there
  std::array<std::uint8_t, kIpcHandleBytes> handle{};
};
static_assert(sizeof(MemoryRange) == 112);

// How rows of a call that lie in memory of the caller's are handled: x, recv_x, y, out.
enum class RowsAre : std::uint32_t {
  kInPlace = 0,
  // Copied, because ...
  kFirstCalls = 1,   // memory is mapped for the third call that names it
  kNotMappable = 2,  // the engines can't map it
  kLimit = 3,        // kMaxMapped are mapped, or it could not be mapped for the moment
  kNoRoom = 4,       // less of the allocation lies after them than the group's region has
  kUnaligned = 5,    // they begin at no multiple of kRowPlaceAlign
  kUnknown = 6,      // how many or which rows there are can't be known when the call is made
};
inline constexpr std::size_t kNumRowsAre = 7;
inline constexpr std::array<const char*, kNumRowsAre> kRowsAreNames = {
    "in_place", "first_calls", "not_mappable", "limit", "no_room", "unaligned", "unknown_rows"};
using RowCounts = std::array<std::uint64_t, kNumRowsAre>;  // by RowsAre

// "" or what is wrong.
inline std::string check_memory_range(const MemoryRange& range, std::size_t num_fds) {
  const auto wrong = [](const char* field, std::uint64_t value, const std::string& allowed) {
    return std::string("memory to be mapped: ") + field + " is " + std::to_string(value) +
           "; allowed: " + allowed;
  };
  if (range.number >= kMaxMapped)
    return wrong("number", range.number, "0 .. " + std::to_string(kMaxMapped - 1));
  if (range.generation == 0 || range.generation > kMaxMemoryGeneration)
    return wrong("generation", range.generation, "1 .. " + std::to_string(kMaxMemoryGeneration));
  if (range.by > MemoryBy::kIpcHandle) return wrong("by", static_cast<std::uint64_t>(range.by), "0 .. 2");
  const std::uint32_t most = range.by == MemoryBy::kDescriptor ? kMaxPieces : 1;
  if (range.pieces == 0 || range.pieces > most)
    return wrong("pieces", range.pieces, "1 .. " + std::to_string(most));
  const std::size_t fds = range.by == MemoryBy::kDescriptor ? range.pieces : 0;
  if (num_fds != fds) return wrong("descriptors", num_fds, std::to_string(fds));
  if (range.by == MemoryBy::kNothing) return "";
  if (range.whole == 0 || range.whole > kMaxMappedBytes) return wrong("whole", range.whole, "1 .. 2^50");
  if (range.whole % range.pieces != 0)
    return wrong("whole", range.whole, "multiples of its " + std::to_string(range.pieces) + " pieces");
  if (range.offset >= range.whole || range.offset % kRowPlaceAlign != 0)
    return wrong("offset", range.offset, "multiples of 16 below " + std::to_string(range.whole));
  const std::uint64_t behind = range.whole - range.offset;
  if (range.bytes == 0 || range.bytes > behind)
    return wrong("bytes", range.bytes, "1 .. " + std::to_string(behind));
  return "";
}

}  // namespace epd::abi
