// Where the rows of one operation lie, if they are not in the regions of its slot: in memory of the rank's
// own that the group's engines have mapped (mapped_memory.h). Plain data, also for device code.
#pragma once

#include <cstdint>

namespace epd::abi {

// Memories that a rank may have mapped in a group at a time.
inline constexpr std::uint32_t kMaxMapped = 64;
// Rows are copied in units of so many bytes.
inline constexpr std::uint64_t kRowPlaceAlign = 16;

// From the highest bit on: the number of a mapped memory + 1, its generation, and how many bytes after its
// begin the rows begin. 0: they lie in the slot's region. The memory with a number may be another one later.
// Then it has another generation, so a place that was captured in a graph never reaches it.
using RowPlace = std::uint64_t;
inline constexpr std::uint32_t kPlaceNumberShift = 56;
inline constexpr std::uint32_t kPlaceGenerationShift = 40;
inline constexpr std::uint32_t kMaxMemoryGeneration = 0xffff;
inline constexpr std::uint64_t kMaxPlaceOffset = (std::uint64_t{1} << kPlaceGenerationShift) - 1;

constexpr RowPlace row_place(std::uint32_t memory, std::uint32_t generation, std::uint64_t offset) {
  return std::uint64_t{memory + 1} << kPlaceNumberShift | std::uint64_t{generation} << kPlaceGenerationShift |
         offset;
}
// kMaxMapped or more: none.
constexpr std::uint32_t memory_of_place(RowPlace place) {
  return static_cast<std::uint32_t>(place >> kPlaceNumberShift) - 1;
}
constexpr std::uint32_t generation_of_place(RowPlace place) {
  return static_cast<std::uint32_t>(place >> kPlaceGenerationShift) & kMaxMemoryGeneration;
}

// A memory that rows may lie in. Kernels load it as a whole while the host changes it, so it has 16 bytes.
struct alignas(16) MappedMemory {
  std::uint64_t word = 0;  // its address / kRowPlaceAlign, and in the lowest bits its generation; 0: none
  std::uint64_t bytes = 0;

  static constexpr std::uint32_t kGenerationBits = 16;
  static constexpr std::uint64_t kMaxAddress =
      (std::uint64_t{1} << (64 - kGenerationBits)) * kRowPlaceAlign - 1;
  static constexpr MappedMemory of(std::uint64_t address, std::uint64_t bytes, std::uint32_t generation) {
    return {address / kRowPlaceAlign << kGenerationBits | generation, bytes};
  }
  constexpr std::uint32_t generation() const { return word & kMaxMemoryGeneration; }
  constexpr std::uint64_t address() const { return (word >> kGenerationBits) * kRowPlaceAlign; }
};
static_assert(sizeof(MappedMemory) == 16);

struct alignas(16) RowPlaces {
  RowPlace in = 0;   // x of a dispatch, y of a combine
  RowPlace out = 0;  // recv_x of a dispatch, out of a combine
  constexpr bool any() const { return (in | out) != 0; }
};

}  // namespace epd::abi
