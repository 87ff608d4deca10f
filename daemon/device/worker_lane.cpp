#include "worker_lane.h"

#include <algorithm>
#include <utility>

namespace epd::device {

using kernels::cuda::LaneState;

std::size_t WorkerLane::own_device_bytes() const {
  return sizeof(LaneState) + WorkerCalls::device_bytes(shape_, device_.max_sms());
}

// A client may make calls as long as its rank is active. The loop does not wait for a main kernel that runs,
// or for the pairs behind it: the device does.
WorkerLane::~WorkerLane() {
  calls_.halt();
  if (pairs_ == nullptr) return;
  calls_.leave();
  pairs_->end();
  leave_running(std::move(pairs_), calls_.layout());
}

void WorkerLane::start_pairs() {
  take_stream();
  PairKernels kernels;
  kernels.context = device_.partition()->context();
  kernels.gate = device_.kernel(kernels::cuda::kGateKernel);
  kernels.main = device_.kernel(kernels::cuda::kMainKernel);
  kernels.main_shared_bytes =
      static_cast<std::uint32_t>(device_.max_shared_bytes()) - kernels::cuda::kStaticBytes;
  Result<std::unique_ptr<PairsAhead>> pairs = PairsAhead::make(driver_, stream_, kernels, calls_.arguments());
  if (!pairs.ok()) device_.fail(pairs.status());
  pairs_ = std::move(*pairs);
}

// Ranks of the group that share the device run their operations at the same time.
std::uint32_t WorkerLane::ctas() const {
  return std::max(1u, device_.num_sms() / calls_.layout().ranks_here);
}

std::uint32_t WorkerLane::asked_sms() const {
  return ctas() - std::min(ctas(), device_.guaranteed_sms(*this));
}

void WorkerLane::follow_share() {
  calls_.guarantee(device_.guaranteed_sms(*this));
  if (pairs_ != nullptr) pairs_->set_sms(ctas(), asked_sms());
}

void WorkerLane::advance() {
  if (pairs_ != nullptr && pairs_->failed_call() != nullptr) must(pairs_->failed_call(), pairs_->failure());
}

}  // namespace epd::device
