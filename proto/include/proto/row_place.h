// Where the rows of one operation lie, if they are not in the regions of its slot: in memory that the rank
// has registered (Bindings::registered). Plain data, also for device code.
#pragma once

#include <cstdint>

namespace epd::abi {

// Memories that a rank may register for a group.
inline constexpr std::uint32_t kMaxRegistered = 16;
// Rows are copied in units of so many bytes.
inline constexpr std::uint64_t kRowPlaceAlign = 16;

// The number of a registered memory + 1, and how many bytes behind its begin the rows begin. 0: they lie in
// the slot's region.
using RowPlace = std::uint64_t;
inline constexpr std::uint32_t kRowPlaceBits = 56;

constexpr RowPlace row_place(std::uint32_t memory, std::uint64_t offset) {
  return std::uint64_t{memory + 1} << kRowPlaceBits | offset;
}

// A memory that `bytes` of rows may lie in.
struct RegisteredMemory {
  std::uint8_t* base = nullptr;
  std::uint64_t bytes = 0;
};

struct alignas(16) RowPlaces {
  RowPlace in = 0;   // x of a dispatch, y of a combine
  RowPlace out = 0;  // recv_x of a dispatch, out of a combine
  constexpr bool any() const { return (in | out) != 0; }
};

}  // namespace epd::abi
