#include "fake_cuda/operation_exchange.h"

#include <algorithm>
#include <optional>

namespace epd::fake_cuda {

using namespace kernels::cuda;

OperationExchange::OperationExchange(const Operation& op, const KernelDevice& device)
    : op_(op), device_(device), start_ns_(ordered::nanoseconds()) {}

// The host takes a place again as soon as it is told that all went well.
void OperationExchange::leave() const {
  if (failed_) end_failed(op_);
}

bool OperationExchange::must_leave(std::int32_t culprit) {
  if (device_.over()) return true;
  if (op_.abort != nullptr && load_acquire(op_.abort) != 0) {
    OpResult ending = ended(OpError::kAborted, culprit);
    ending.num_dropped = num_dropped_;
    publish(ending);
    return true;
  }
  if (ordered::nanoseconds() - start_ns_ < op_.timeout_ns) return false;
  publish(ended(OpError::kDeadline, culprit));
  return true;
}

bool OperationExchange::wait_ready() {
  if (op_.signal.ready == nullptr) return true;
  for (unsigned looks = 1; static_cast<std::int32_t>(load_acquire(op_.signal.ready) - op_.signal.value) < 0;
       ++looks) {
    if (must_leave(-1)) return false;
    device_.pause(looks);
  }
  return true;
}

void OperationExchange::publish(const OpResult& ending) {
  failed_ = ending.error != OpError::kNone;
  if (!failed_) tell_stream(op_);
  kernels::cuda::publish(op_, ending);
}

bool OperationExchange::wait_signals(const abi::SignalLine* lines) {
  std::uint32_t waiting = 0;
  for_ranks_there([&](std::uint32_t rank) { waiting |= 1u << rank; });
  for (unsigned looks = 1;; ++looks) {
    for (std::uint32_t rank = 0; rank < op_.shape.num_ranks; ++rank) {
      const bool mine = (waiting >> rank & 1) != 0;
      if (mine && load_acquire(&lines[rank].tag) >= op_.tag) waiting &= ~(1u << rank);
    }
    if (waiting == 0) return true;
    if (must_leave(static_cast<std::int32_t>(__builtin_ctz(waiting)))) return false;
    device_.pause(looks);
  }
}

void OperationExchange::announce() const {
  for_ranks_there([&](std::uint32_t rank) {
    const Peer& peer = op_.peers[rank];
    peer.announcement[op_.rank] = op_.announcement;
    store_release(&peer.ready[op_.rank].tag, op_.tag);
  });
}

bool OperationExchange::check_announcements() {
  std::optional<std::uint32_t> differs;
  for_ranks_there([&](std::uint32_t rank) {
    const abi::OpAnnouncement& theirs = own().announcement[rank];
    const abi::OpAnnouncement& mine = op_.announcement;
    const bool same =
        theirs.op == mine.op && theirs.slot == mine.slot && abi::same_routing(theirs.routing, mine.routing);
    if (!same && !differs) differs = rank;
  });
  if (differs) publish(ended(OpError::kMismatch, static_cast<std::int32_t>(*differs)));
  return !differs;
}

bool OperationExchange::arrive() {
  if (op_.counts.host_sent != nullptr) store_release(op_.counts.host_sent, op_.tag);
  for_ranks_there(
      [&](std::uint32_t rank) { store_release(&op_.peers[rank].arrived[op_.rank].tag, op_.tag); });
  return wait_signals(own().arrived);
}

}  // namespace epd::fake_cuda
