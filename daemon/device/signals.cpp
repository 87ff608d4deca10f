#include "device/signals.h"

namespace epd::device {

using abi::OpStage;

namespace {

bool is_active(const SignalledOperation& op, std::uint32_t rank) {
  return op.masked.empty() || op.masked[rank] == 0;
}

}  // namespace

std::uint32_t SignalCopy::missing_ready(const SignalledOperation& op, std::uint32_t from) const {
  const abi::SignalLine* const lines = ready(op.block);
  while (from < num_ranks_ && (!is_active(op, from) || lines[from].tag >= op.tag)) ++from;
  return from < num_ranks_ ? from : kNobody;
}

// Through inboxes a rank's own line says that it has ended the operation, and nobody waits for that.
std::uint32_t SignalCopy::missing_arrived(const SignalledOperation& op, std::uint32_t from) const {
  const abi::SignalLine* const lines = arrived(op.block);
  if (!by_inboxes_ && lines[op.rank].tag < op.tag) return kNobody;  // it waits for nobody yet
  const auto there = [&](std::uint32_t rank) {
    return !is_active(op, rank) || rank == op.rank || lines[rank].tag >= op.tag;
  };
  while (from < num_ranks_ && there(from)) ++from;
  return from < num_ranks_ ? from : kNobody;
}

OpStage SignalCopy::stage(const SignalledOperation& op) const {
  if (ready(op.block)[op.rank].tag < op.tag) return OpStage::kPlanning;
  if (missing_ready(op, 0) != kNobody) return OpStage::kWaitReady;
  return missing_arrived(op, 0) != kNobody ? OpStage::kWaitArrived : OpStage::kMoving;
}

std::uint32_t SignalCopy::awaited(const SignalledOperation& op, std::uint32_t from) const {
  switch (stage(op)) {
    case OpStage::kWaitReady: return missing_ready(op, from);
    case OpStage::kWaitArrived: return missing_arrived(op, from);
    default: return kNobody;
  }
}

}  // namespace epd::device
