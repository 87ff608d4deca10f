#include "resident_lane.h"

#include <algorithm>
#include <utility>

namespace epd::device {

using kernels::cuda::ResidentArguments;
using kernels::cuda::ResidentState;

std::size_t ResidentLane::own_device_bytes() const {
  return sizeof(ResidentState) + ResidentCalls::device_bytes(shape_, device_.max_sms());
}

// A client may make calls as long as its rank is here: the last kernel ends what it runs, and then nobody
// waits for another. The loop does not wait for that kernel: it may not have begun.
ResidentLane::~ResidentLane() {
  calls_.halt();
  if (stream_ == nullptr) return;
  if (runs() && !stopping()) stop();
  leave_running(held_, aside_ ? 0 : told_ns_, calls_.layout());
}

void ResidentLane::follow_share() {
  if (stopping() || !calls_.opened()) return;
  if (stream_ == nullptr) take_stream();
  const std::uint32_t share = device_.lane_sms(*this);
  waits_ = false;
  if (ctas_ == share) return;
  waits_ = share > ctas_ && !device_.has_room(*this, share);
  if (waits_) return;
  held_ = std::max(held_, share);
  const bool ran = runs();
  ctas_ = share;
  if (ran) {
    stop();
  } else {
    start_kernel();
  }
}

bool ResidentLane::advance() {
  if (waits_) follow_share();
  follow_round();
  if (!stopping()) return waits_;
  const CUresult state = driver_.cuStreamQuery(stream_);
  if (state == CUDA_ERROR_NOT_READY) return true;
  must("cuStreamQuery", state);
  const std::uint64_t told_ns = std::exchange(told_ns_, 0);
  if (!std::exchange(aside_, false) && yield_epoch_ == device_.yield_epoch()) device_.kernel_stopped(told_ns);
  start_kernel();
  follow_share();  // of what came meanwhile
  return stopping() || waits_;
}

void ResidentLane::start_kernel() {
  held_ = ctas_;
  yield_epoch_ = device_.yield_epoch();
  if (++kernels_ == 0) ++kernels_;
  ResidentArguments own{reinterpret_cast<ResidentState*>(own_device()), device_.yield_epoch_word(),
                        yield_epoch_, kernels_, calls_.arguments()};
  void* arguments[] = {&own};
  const CUkernel kernel = device_.kernel(kernels::cuda::kResidentKernel);
  const auto shared = static_cast<unsigned>(device_.max_shared_bytes()) - kernels::cuda::kStaticBytes;
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), ctas_, 1, 1, kernels::cuda::kMaxThreads,
                              1, 1, shared, stream_, arguments, nullptr));
}

void ResidentLane::stop() {
  calls_.stop(kernels_);
  told_ns_ = device_.now_ns();
}

// It has seen by itself that it is to leave.
void ResidentLane::follow_round() {
  if (!runs() || stopping() || yield_epoch_ == device_.yield_epoch()) return;
  aside_ = true;
  told_ns_ = device_.now_ns();
}

}  // namespace epd::device
