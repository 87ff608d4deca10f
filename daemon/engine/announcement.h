// One block of an exchange arena: what ranks tell each other about one operation. The ordering
// argument: a source stores announcement and counts, then `ready` with release; a reader that loads
// `ready` with acquire and finds the tag sees them. Likewise rows and `arrived`.
#pragma once

#include "proto/exchange.h"
#include "proto/session.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace epd {

// View of the block for operation `op_index` in one rank's exchange arena. Ranks whose `active_since` is 0
// are masked: nobody waits for them, and what they announced once is not looked at.
class ExchangeBlock {
 public:
  ExchangeBlock(std::byte* arena, const abi::GroupShape& shape, const abi::ExchangeArenaLayout& layout,
                std::uint64_t op_index, std::span<const std::uint64_t> active_since)
      : base_(arena + layout.block(op_index, shape.depth)),
        shape_(shape),
        layout_(layout),
        active_since_(active_since) {}

  // Of a block, wherever it lies.
  ExchangeBlock(std::byte* block, const abi::GroupShape& shape, const abi::ExchangeArenaLayout& layout,
                std::span<const std::uint64_t> active_since)
      : base_(block), shape_(shape), layout_(layout), active_since_(active_since) {}

  std::atomic_ref<std::uint64_t> ready(std::uint32_t source) const { return line(layout_.ready, source); }
  std::atomic_ref<std::uint64_t> arrived(std::uint32_t source) const { return line(layout_.arrived, source); }
  abi::OpAnnouncement& announcement(std::uint32_t source) const {
    return reinterpret_cast<abi::OpAnnouncement*>(base_ + layout_.announcement)[source];
  }
  // Rows that `source` sends to each rank.
  std::uint32_t* rank_counts(std::uint32_t source) const {
    return reinterpret_cast<std::uint32_t*>(base_ + layout_.rank_counts) +
           std::size_t{source} * shape_.num_ranks;
  }
  // [E] of `source`: selections (compact: only of the arena's rank's experts) or rows of each expert.
  std::uint32_t* expert_counts(std::uint32_t source) const {
    return reinterpret_cast<std::uint32_t*>(base_ + layout_.expert_counts) +
           std::size_t{source} * shape_.num_experts;
  }

  // The first source, from `from` on, that has not got as far as `tag`; num_ranks if all have.
  std::uint32_t first_not_ready(std::uint64_t tag, std::uint32_t from) const;
  std::uint32_t first_not_arrived(std::uint64_t tag, std::uint32_t from) const;

  // Compares everybody's announcement with that of `own`. The rank that differs and a sentence
  // with the field and both values, or nothing.
  struct Disagreement {
    std::uint32_t rank;
    std::string text;
  };
  // Among ranks [begin, end).
  std::optional<Disagreement> disagreement(std::uint32_t own, std::uint64_t op_index, std::uint32_t begin,
                                           std::uint32_t end) const;

 private:
  bool masked(std::uint32_t rank) const { return active_since_[rank] == 0; }
  std::atomic_ref<std::uint64_t> line(std::uint64_t offset, std::uint32_t index) const {
    return std::atomic_ref(reinterpret_cast<abi::SignalLine*>(base_ + offset)[index].tag);
  }

  std::byte* base_;
  const abi::GroupShape& shape_;
  const abi::ExchangeArenaLayout& layout_;
  std::span<const std::uint64_t> active_since_;  // [R]
};

const char* op_name(abi::Op op);

}  // namespace epd
