// How far operations have come, from what ranks have signalled in a rank's exchange blocks
// (proto/exchange.h). Used where the engine has to ask the device for that. It is a copy of the signals, from
// a moment ago.
#pragma once

#include "proto/exchange.h"
#include "proto/link.h"
#include "proto/waits.h"

#include <cstdint>
#include <span>
#include <vector>

namespace epd::device {

// The operation whose signals are looked at.
struct SignalledOperation {
  std::uint32_t rank = 0;  // the rank that owns the blocks
  std::uint64_t tag = 0;   // abi::op_tag
  std::uint32_t block = 0;
  std::span<const std::uint8_t> masked;  // [R] not 0: the rank is inactive. Empty: all are active
  std::uint32_t together = 0;            // GroupView::together
};

class SignalCopy {
 public:
  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};

  // `by_inboxes`: operations take the low-latency path. There a rank says only at the end that it has sent
  // all.
  SignalCopy(std::uint32_t num_ranks, std::uint32_t depth, bool by_inboxes)
      : num_ranks_(num_ranks), by_inboxes_(by_inboxes), lines_(std::size_t{3} * num_ranks * depth) {}

  // [depth,3,R]: `ready`, then `arrived`, then `called`, of each block.
  std::span<abi::SignalLine> lines() { return lines_; }

  // Whether the rank has announced the operation: a kernel carries it out.
  bool announced(const SignalledOperation& op) const;
  // Whether its call stands: a kernel has looked at it, and waits for other ranks to call.
  bool stands(const SignalledOperation& op) const;
  // kPlanning: the rank has not announced the operation. kWaitReady: another rank has not, or has not called
  // it while this rank waits for that. kWaitArrived: the rank has sent all, and another has not.
  abi::OpStage stage(const SignalledOperation& op) const;
  // The first rank, from `from` on, that it waits for in kWaitReady and kWaitArrived, else kNobody.
  std::uint32_t awaited(const SignalledOperation& op, std::uint32_t from) const;

  // When the copy was begun: nothing in it is older.
  std::uint64_t begun_ns = 0;

 private:
  const abi::SignalLine* ready(std::uint32_t block) const {
    return lines_.data() + std::size_t{3} * num_ranks_ * block;
  }
  const abi::SignalLine* arrived(std::uint32_t block) const { return ready(block) + num_ranks_; }
  const abi::SignalLine* called(std::uint32_t block) const { return arrived(block) + num_ranks_; }
  std::uint32_t missing_called(const SignalledOperation& op, std::uint32_t from) const;
  std::uint32_t missing_ready(const SignalledOperation& op, std::uint32_t from) const;
  std::uint32_t missing_arrived(const SignalledOperation& op, std::uint32_t from) const;

  const std::uint32_t num_ranks_;
  const bool by_inboxes_;
  std::vector<abi::SignalLine> lines_;
};

// Adds up, from look to look, whom operations were seen to wait for.
class SeenWaits {
 public:
  // Does nothing if it has had this look already.
  void look(const SignalCopy& signals, const SignalledOperation& op, const abi::RankWaits& counted);

 private:
  std::uint64_t tag_ = 0;  // of the last look
  abi::OpStage stage_ = abi::OpStage::kNone;
  std::uint64_t seen_ns_ = 0;
};

}  // namespace epd::device
