#include "fake_cuda/operation_exchange.h"

#include <chrono>

namespace epd::fake_cuda {

using namespace kernels::cuda;

std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

OpResult ended(OpError error, std::int32_t culprit) {
  OpResult ending{};
  ending.error = error;
  ending.culprit = culprit;
  ending.expert = -1;
  return ending;
}

OperationExchange::OperationExchange(const Operation& op, const KernelDevice& device)
    : op_(op), device_(device), start_ns_(nanoseconds()) {}

void OperationExchange::tell_stream() const {
  if (op_.signal.flag != nullptr) store_release(op_.signal.flag, 1u);
  if (op_.signal.done != nullptr) store_release(op_.signal.done, op_.signal.value);
}

// The host takes a place again as soon as it is told that all went well.
void OperationExchange::leave() const {
  if (!failed_) return;
  if (op_.signal.failed != nullptr) std::atomic_ref(*op_.signal.failed).fetch_add(1);
  tell_stream();
  store_release(&op_.result->left, op_.tag);
}

bool OperationExchange::must_leave(OpResult ending) {
  if (device_.over()) return true;
  const bool aborted = op_.abort != nullptr && load_acquire(op_.abort) != 0;
  if (!aborted && nanoseconds() - start_ns_ < op_.timeout_ns) return false;
  ending.error = aborted ? OpError::kAborted : OpError::kDeadline;
  publish(ending);
  return true;
}

bool OperationExchange::wait_ready() {
  if (op_.signal.ready == nullptr) return true;
  for (unsigned looks = 1; static_cast<std::int32_t>(load_acquire(op_.signal.ready) - op_.signal.value) < 0;
       ++looks) {
    if (must_leave(ended(OpError::kNone, -1))) return false;
    device_.pause(looks);
  }
  return true;
}

void OperationExchange::publish(const OpResult& ending) {
  failed_ = ending.error != OpError::kNone;
  if (!failed_) tell_stream();
  OpResult& result = *op_.result;
  const OpResult copy = ending;
  result.error = copy.error;
  result.culprit = copy.culprit;
  result.token = copy.token;
  result.k = copy.k;
  result.value = copy.value;
  result.expert = copy.expert;
  result.rows = copy.rows;
  result.room = copy.room;
  result.num_recv_rows = copy.num_recv_rows;
  result.num_dropped = copy.num_dropped;
  store_release(&result.tag, op_.tag);
}

}  // namespace epd::fake_cuda
