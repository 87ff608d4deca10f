// How far operations have come, by what ranks have signalled in a rank's exchange blocks (proto/exchange.h):
// where the engine has to ask the device for that. A copy of the signals, as they were a moment ago.
#pragma once

#include "proto/exchange.h"
#include "proto/link.h"

#include <cstdint>
#include <span>
#include <vector>

namespace epd::device {

// Whose signals are looked at.
struct SignalledOperation {
  std::uint32_t rank = 0;  // whose blocks they are
  std::uint64_t tag = 0;   // abi::op_tag
  std::uint32_t block = 0;
  std::span<const std::uint8_t> masked;  // [R] not 0: the rank is not active. Empty: all are
};

class SignalCopy {
 public:
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};

  // `by_inboxes`: operations go by inboxes. Of these a rank says only at the end that it has sent all.
  SignalCopy(std::uint32_t num_ranks, std::uint32_t depth, bool by_inboxes)
      : num_ranks_(num_ranks), by_inboxes_(by_inboxes), lines_(std::size_t{2} * num_ranks * depth) {}

  // [depth,2,R]: `ready`, then `arrived`, of each block.
  std::span<abi::SignalLine> lines() { return lines_; }

  // kPlanning: the rank has not announced it. kWaitReady: another has not. kWaitArrived: the rank is done
  // with the others, and one of them is not done with it.
  abi::OpStage stage(const SignalledOperation& op) const;
  // The first rank, from `from` on, that it waits for in kWaitReady and kWaitArrived; else kNobody.
  std::uint32_t awaited(const SignalledOperation& op, std::uint32_t from) const;

  // Nothing that is seen is older.
  std::uint64_t begun_ns = 0;

 private:
  const abi::SignalLine* ready(std::uint32_t block) const {
    return lines_.data() + std::size_t{2} * num_ranks_ * block;
  }
  const abi::SignalLine* arrived(std::uint32_t block) const { return ready(block) + num_ranks_; }
  std::uint32_t missing_ready(const SignalledOperation& op, std::uint32_t from) const;
  std::uint32_t missing_arrived(const SignalledOperation& op, std::uint32_t from) const;

  const std::uint32_t num_ranks_;
  const bool by_inboxes_;
  std::vector<abi::SignalLine> lines_;
};

}  // namespace epd::device
