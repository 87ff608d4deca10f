// Memory of the caller's own, as operations take it (epd_memory_t): where the regions lie in it, and what may
// be written there.
#pragma once

#include "proto/arena.h"
#include "support/cases.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace epd::test {

// A slot as it lies in an arena.
class SlotImage {
 public:
  explicit SlotImage(const Case& c);
  std::size_t bytes() const { return bytes_; }
  epd_buffers_t buffers(std::byte* at) const;
  std::byte* region(std::byte* at, abi::Region region) const;  // null: the group has none

 private:
  const abi::GroupShape shape_;
  std::array<std::size_t, abi::kNumRegions> offset_{};
  std::size_t bytes_ = 0;
};

// Regions of one rank in memory of its own: tight, at odd addresses, with guards between them.
class CallerMemory {
 public:
  // `named`: by abi::region_bit. There are `tokens` rows of tokens. `recv_rows`: as epd_memory_t has it.
  // `aligned`: regions begin at multiples of 16.
  CallerMemory(const Case& c, std::uint32_t named, std::uint32_t tokens, std::uint32_t recv_rows,
               std::uint64_t seed, bool aligned = false);

  std::size_t bytes() const { return bytes_; }
  epd_memory_t memory(std::byte* at) const;
  bool has(abi::Region region) const { return (named_ >> static_cast<std::uint32_t>(region) & 1) != 0; }

  // Copies the region's rows from a slot's image to this memory's.
  void put(abi::Region region, std::byte* mine, const std::byte* slot) const;
  // The other way round. `marks`: rows that no token fills say so.
  void take(abi::Region region, const std::byte* mine, std::byte* slot, bool marks) const;
  void poison(abi::Region region, std::byte* mine) const;
  // "" or where the memory was written to. `written`: regions that may have been.
  std::string changes(const std::byte* before, const std::byte* after, std::uint32_t written) const;

 private:
  struct Place {
    std::size_t offset = 0;
    std::size_t row_bytes = 0;
    std::size_t rows = 0;
    bool received = false;
  };
  const Place& place(abi::Region region) const { return places_[static_cast<std::size_t>(region)]; }
  std::size_t column_rows() const;  // from one column of scales to the next
  void renumber(abi::Region region, std::byte* numbers, std::int64_t blocks_apart) const;

  const Case case_;
  const abi::GroupShape shape_;
  const SlotImage image_;
  std::uint32_t named_ = 0;
  std::uint32_t recv_rows_ = 0;
  std::size_t blocks_ = 1;
  std::size_t own_block_ = 0;
  std::size_t region_block_ = 0;
  std::size_t columns_ = 0;  // of scales; 0: they lie with their rows
  std::array<Place, abi::kNumRegions> places_{};
  std::size_t bytes_ = 0;
};

inline constexpr std::uint32_t kDispatchInputs =
    abi::region_bit(abi::Region::kX) | abi::region_bit(abi::Region::kXScales) |
    abi::region_bit(abi::Region::kTopkIdx) | abi::region_bit(abi::Region::kTopkWeights);
inline constexpr std::uint32_t kRowOutputs =
    abi::region_bit(abi::Region::kRecvX) | abi::region_bit(abi::Region::kRecvScales) |
    abi::region_bit(abi::Region::kRecvTopkIdx) | abi::region_bit(abi::Region::kRecvTopkWeights) |
    abi::region_bit(abi::Region::kRecvSrc);
inline constexpr std::uint32_t kCountOutputs =
    abi::region_bit(abi::Region::kRankOffsets) | abi::region_bit(abi::Region::kExpertCounts) |
    abi::region_bit(abi::Region::kExpertOffsets) | abi::region_bit(abi::Region::kSourceRanges);
inline constexpr std::uint32_t kDispatchOutputs = kRowOutputs | kCountOutputs;
inline constexpr std::uint32_t kCombineInputs =
    abi::region_bit(abi::Region::kY) | abi::region_bit(abi::Region::kYWeights) |
    abi::region_bit(abi::Region::kTopkWeights) | abi::region_bit(abi::Region::kBias0) |
    abi::region_bit(abi::Region::kBias1);
inline constexpr std::uint32_t kCombineOutputs =
    abi::region_bit(abi::Region::kOut) | abi::region_bit(abi::Region::kOutWeights);
inline constexpr std::uint32_t kAllRegions = (1u << abi::kNumRegions) - 1;

}  // namespace epd::test
