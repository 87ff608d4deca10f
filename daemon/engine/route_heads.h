// What an engine keeps of routings whose other parts only the device reads.
#pragma once

#include "device/launcher.h"
#include "proto/arena.h"

#include <vector>

namespace epd {

// The heads of a rank's routing records.
class RouteHeads {
 public:
  using Head = kernels::cuda::RouteHead;

  RouteHeads(const abi::GroupShape& shape, Launcher& launcher)
      : layout_(shape), launcher_(launcher), heads_(shape.num_routes()) {}

  // Of dispatch `op_index`, from memory or, after a restart, from `arena` (if not null); null if stale.
  const Head* find(std::uint32_t record, std::uint64_t op_index, const std::byte* arena);
  // Selections that the dispatch saved in the record dropped; 0 if there is none.
  std::uint32_t saved_dropped(std::uint32_t record, const std::byte* arena) const;
  // If it is that of dispatch `op_index`.
  void forget(std::uint32_t record, std::uint64_t op_index) {
    if (heads_[record].handle == op_index + 1) heads_[record] = {};
  }
  void keep(std::uint32_t record, const Head& head) { heads_[record] = head; }

 private:
  Head saved(std::uint32_t record, const std::byte* arena) const;

  const abi::ExchangeArenaLayout layout_;
  Launcher& launcher_;
  std::vector<Head> heads_;
};

}  // namespace epd
