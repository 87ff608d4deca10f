#include "fake_cuda/operation_exchange.h"

namespace epd::fake_cuda {

using namespace kernels;
using namespace kernels::cuda;
using kernels::cuda::Operation;

OperationExchange::OperationExchange(const Operation& op, const KernelDevice& device)
    : op_(op), device_(device), start_ns_(ordered::nanoseconds()) {}

// The host takes a place again as soon as it is told that all went well.
void OperationExchange::leave() const {
  if (failed_) end_failed(op_);
}

bool OperationExchange::must_leave(OpResult ending) {
  if (device_.over()) return true;
  const bool aborted = op_.abort != nullptr && load_acquire(op_.abort) != 0;
  if (!aborted && ordered::nanoseconds() - start_ns_ < op_.timeout_ns) return false;
  ending.error = aborted ? OpError::kAborted : OpError::kDeadline;
  publish(ending);
  return true;
}

void OperationExchange::publish(const OpResult& ending) {
  failed_ = ending.error != OpError::kNone;
  if (!failed_) unblock_stream(op_);
  kernels::cuda::publish(op_, ending);
}

}  // namespace epd::fake_cuda
