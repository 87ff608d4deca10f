// The routings that one rank keeps, as far as the engine looks at them: their other parts only the device
// reads. All lie in the exchange arena, and outlive the engine.
#pragma once

#include "device/launcher.h"
#include "proto/exchange.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace epd::engine {

// Whether abi::RoutingRecord::handle is that of dispatch `op_index`, however either is counted.
inline bool is_of(std::uint64_t handle, std::uint64_t op_index) {
  return handle != 0 && abi::same_index(handle, op_index + 1);
}

// The heads of a rank's routing records. A record has two halves: what its last dispatch left stays until the
// next one has ended, since a break may have its combine done again after this rank has gone on to the next.
class RouteHeads {
 public:
  using Head = abi::RoutingRecord;
  struct Place {
    Head head{};
    std::byte* half = nullptr;           // in the arena
    std::uint32_t half_index = 0;        // of the record's two
    std::shared_ptr<const void> making;  // of begin(): for who makes it to hold
  };

  RouteHeads(const abi::GroupShape& shape, device::Launcher& launcher)
      : layout_(shape), launcher_(launcher), records_(shape.num_routes()) {}

  // Whether nobody makes one in the record. Until a dispatch is seen to have ended, its group may go on from
  // an operation that wants the routing before, and the next dispatch would overwrite that, even if aborted.
  bool may_begin(std::uint32_t record) const { return records_[record].making.expired(); }
  // Where a dispatch writes its routing, `head` with it. It is found from now on.
  Place begin(std::uint32_t record, const Head& head, std::byte* arena);
  // Of dispatch `op_index`; `half` null if stale.
  Place find(std::uint32_t record, std::uint64_t op_index, std::byte* arena);
  // Of the dispatch that `head` names.
  void update(std::uint32_t record, const Head& head);
  void forget(std::uint32_t record, std::uint64_t op_index);
  // For calls, whose kernels write heads themselves: those in the arena are the truth.
  struct Standing {
    Head head{};  // handle 0: there is none
    std::uint32_t half = 0;
  };
  // Of each record's last dispatch before operation `next`. What is of that or of later ones is from before a
  // break: it is forgotten, in the arena too.
  std::vector<Standing> standing(std::uint64_t next, std::byte* arena);
  // Selections that the last dispatch saved in the record dropped; 0 if there is none.
  std::uint32_t saved_dropped(std::uint32_t record, std::byte* arena);

 private:
  struct Record {
    bool loaded = false;  // a former engine may have left something in the arena
    std::array<Head, 2> halves{};
    std::weak_ptr<const void> making{};
  };
  Record& load(std::uint32_t record, const std::byte* arena);
  void load_all(const std::byte* arena);
  Standing standing_in(std::uint32_t record, std::uint64_t next, std::byte* arena);
  std::byte* half_at(std::byte* arena, std::uint32_t record, std::size_t half) const {
    return arena + layout_.routing_of(record) + layout_.half_bytes * half;
  }

  const abi::ExchangeArenaLayout layout_;
  device::Launcher& launcher_;
  std::vector<Record> records_;
};

}  // namespace epd::engine
