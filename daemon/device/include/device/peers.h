// The ranks of an operation, as its device sees them.
#pragma once

#include "kernels/operation.h"
#include "proto/exchange.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::device {

// The half of a routing record that the dispatch with this tag wrote; null: neither half is. `exchange` is
// the rank's arena.
inline const std::byte* find_routing(const std::byte* exchange, const abi::ExchangeArenaLayout& layout,
                                     std::uint32_t record, std::uint64_t tag) {
  const std::byte* half = exchange + layout.routing_of(record);
  for (int i = 0; i < 2; ++i, half += layout.half_bytes) {
    const auto* head = reinterpret_cast<const abi::RoutingRecord*>(half);
    if (head->handle == abi::index_of_tag(tag) + 1 && head->epoch == abi::epoch_of_tag(tag)) return half;
  }
  return nullptr;
}

class OperationPeers {
 public:
  virtual ~OperationPeers() = default;
  // For an active rank. Computed at each call, because a group may have more ranks than fit in an Operation.
  virtual kernels::Peer peer(std::uint32_t rank) const = 0;
  // [R] not 0: the rank is inactive. Empty: all ranks are active.
  virtual std::span<const std::uint8_t> masked() const = 0;

  // ---- of groups whose ranks are on several nodes

  // A gateway needs these of a rank of its node, for a combine or for a dispatch that reuses a routing.
  struct RoutedRows {
    const std::int32_t* placement = nullptr;  // kernels::Placement's words of the dispatch; null: it has none
    const std::uint16_t* y = nullptr;         // combine: [rows,H]
    const float* y_weights = nullptr;         // [rows,C], whether or not the rank itself asks for weights
  };
  // `routing` is the tag of that dispatch, as it was announced.
  virtual RoutedRows routed_rows(std::uint32_t /*rank*/, std::uint64_t /*routing*/) const { return {}; }
  // Whether an active rank of any node holds rows of that dispatch, that is, it was active then.
  virtual bool holds_rows(std::uint32_t rank, std::uint64_t /*routing*/) const { return active(rank); }

  // This rank has stored (with release) what others wait for. Their engines may sleep, so they are rung.
  virtual void ring() const = 0;

  bool active(std::uint32_t rank) const { return masked().empty() || masked()[rank] == 0; }
};

}  // namespace epd::device
