#include "device/signals.h"

#include "proto/statistics.h"

#include <utility>

namespace epd::device {

using abi::OpStage;

namespace {

bool is_active(const SignalledOperation& op, std::uint32_t rank) {
  return op.masked.empty() || op.masked[rank] == 0;
}

}  // namespace

// The kernel begins the operation when none is missing. It has told so itself if it waits.
std::uint32_t SignalCopy::missing_called(const SignalledOperation& op, std::uint32_t from) const {
  const abi::SignalLine* const lines = called(op.block);
  if (lines[op.rank].tag < op.tag) return kNobody;
  const bool for_all = lines[op.rank].waiting >= op.tag;
  const auto there = [&](std::uint32_t rank) {
    const bool awaited = for_all ? is_active(op, rank) : ((op.together >> rank) & 1) != 0;
    return !awaited || lines[rank].tag >= op.tag;
  };
  while (from < num_ranks_ && there(from)) ++from;
  return from < num_ranks_ ? from : kNobody;
}

// One that has called the operation waits for another itself, if any is missing that has not called it.
std::uint32_t SignalCopy::missing_ready(const SignalledOperation& op, std::uint32_t from) const {
  const auto next = [&](std::uint32_t rank, bool late) {
    const auto there = [&] {
      return !is_active(op, rank) || ready(op.block)[rank].tag >= op.tag ||
             (late && called(op.block)[rank].tag >= op.tag);
    };
    while (rank < num_ranks_ && there()) ++rank;
    return rank < num_ranks_ ? rank : kNobody;
  };
  return next(from, next(0, true) != kNobody);
}

// On the low-latency path a rank's own line says that it has ended the operation. Nobody waits for that line.
std::uint32_t SignalCopy::missing_arrived(const SignalledOperation& op, std::uint32_t from) const {
  const abi::SignalLine* const lines = arrived(op.block);
  if (!by_inboxes_ && lines[op.rank].tag < op.tag) return kNobody;  // the rank waits for nobody yet
  const auto there = [&](std::uint32_t rank) {
    return !is_active(op, rank) || rank == op.rank || lines[rank].tag >= op.tag;
  };
  while (from < num_ranks_ && there(from)) ++from;
  return from < num_ranks_ ? from : kNobody;
}

bool SignalCopy::stands(const SignalledOperation& op) const {
  return !announced(op) && missing_called(op, 0) != kNobody;
}

bool SignalCopy::announced(const SignalledOperation& op) const {
  return ready(op.block)[op.rank].tag >= op.tag;
}

OpStage SignalCopy::stage(const SignalledOperation& op) const {
  if (!announced(op)) return stands(op) ? OpStage::kWaitReady : OpStage::kPlanning;
  if (missing_ready(op, 0) != kNobody) return OpStage::kWaitReady;
  return missing_arrived(op, 0) != kNobody ? OpStage::kWaitArrived : OpStage::kMoving;
}

std::uint32_t SignalCopy::awaited(const SignalledOperation& op, std::uint32_t from) const {
  switch (stage(op)) {
    case OpStage::kWaitReady: return announced(op) ? missing_ready(op, from) : missing_called(op, from);
    case OpStage::kWaitArrived: return missing_arrived(op, from);
    default: return kNobody;
  }
}

// A rank that is missing now was also missing at the poll before, if that was at the same stage.
void SeenWaits::look(const SignalCopy& signals, const SignalledOperation& op, const abi::RankWaits& counted) {
  if (op.tag == tag_ && signals.begun_ns == seen_ns_) return;
  const OpStage stage = signals.stage(op);
  const bool goes_on = op.tag == tag_ && stage == stage_;
  const std::uint64_t passed_ns = signals.begun_ns - std::exchange(seen_ns_, signals.begun_ns);
  tag_ = op.tag;
  stage_ = stage;
  if (!goes_on || counted.peers == nullptr) return;
  for (std::uint32_t rank = signals.awaited(op, 0); rank != SignalCopy::kNobody;
       rank = signals.awaited(op, rank + 1)) {
    abi::PeerWait& peer = counted.peers[rank];
    abi::count(stage == OpStage::kWaitReady ? peer.ready_ns : peer.arrived_ns, passed_ns);
  }
}

}  // namespace epd::device
