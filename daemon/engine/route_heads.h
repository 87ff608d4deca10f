// The routings that one rank keeps, as far as the engine reads them. Only the device reads their other parts.
// All lie in the exchange arena and outlive the engine.
#pragma once

#include "device/launcher.h"
#include "proto/exchange.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace epd::engine {

// Whether abi::RoutingRecord::handle is that of dispatch `op_index`. Both may be counted in either way.
inline bool is_of(std::uint64_t handle, std::uint64_t op_index) {
  return handle != 0 && abi::same_index(handle, op_index + 1);
}

// The heads of a rank's routing records. A record has two halves. What its last dispatch wrote stays until
// the next dispatch has ended, because after a break its combine may be repeated when this rank has already
// gone on to the next dispatch.
class RouteHeads {
 public:
  using Head = abi::RoutingRecord;
  struct Place {
    Head head{};
    std::byte* half = nullptr;           // in the arena
    std::uint32_t half_index = 0;        // which of the record's two halves
    std::shared_ptr<const void> making;  // from begin(): held by whoever makes the routing
  };

  RouteHeads(const abi::GroupShape& shape, device::Launcher& launcher)
      : layout_(shape), launcher_(launcher), records_(shape.num_routes()) {}

  // Whether no dispatch is making a routing in the record. Until such a dispatch is known to have ended, its
  // group may resume at an operation that needs the previous routing, and the next dispatch would overwrite
  // that, even if it were aborted.
  bool may_begin(std::uint32_t record) const { return records_[record].making.expired(); }
  // Where a dispatch writes its routing, with `head`. From now on the routing is found.
  Place begin(std::uint32_t record, const Head& head, std::byte* arena);
  // The routing of dispatch `op_index`; `half` is null if it is stale.
  Place find(std::uint32_t record, std::uint64_t op_index, std::byte* arena);
  // Updates the routing of the dispatch that `head` names.
  void update(std::uint32_t record, const Head& head);
  void forget(std::uint32_t record, std::uint64_t op_index);
  // For calls, whose kernels write heads themselves: those in the arena are valid.
  struct Standing {
    Head head{};  // handle 0: there is none
    std::uint32_t half = 0;
  };
  // The routing of each record's last dispatch before operation `next`. Routings of that operation or later
  // ones are from before a break: they are forgotten, in the arena too.
  std::vector<Standing> standing(std::uint64_t next, std::byte* arena);
  // Selections dropped by the dispatch whose routing the record holds; 0 if it holds none.
  std::uint32_t saved_dropped(std::uint32_t record, std::byte* arena);

 private:
  struct Record {
    bool loaded = false;  // a former engine may have left routings in the arena
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
