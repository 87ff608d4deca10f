// The ranks of an operation, as its device sees them.
#pragma once

#include "kernels/cuda_operation.h"

#include <cstdint>
#include <span>

namespace epd {

class OperationPeers {
 public:
  virtual ~OperationPeers() = default;
  // Of a rank that is active. Computed at each call: a group may have more ranks than fit in an Operation.
  virtual kernels::cuda::Peer peer(std::uint32_t rank) const = 0;
  // [R] not 0: the rank is not active. Empty: all are.
  virtual std::span<const std::uint8_t> masked() const = 0;
  // This rank has stored (with release) what others wait for, and their engines may sleep.
  virtual void ring() const = 0;

  bool active(std::uint32_t rank) const { return masked().empty() || masked()[rank] == 0; }
};

}  // namespace epd
