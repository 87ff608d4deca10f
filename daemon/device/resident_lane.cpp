#include "resident_lane.h"

#include <cstddef>

namespace epd {

using kernels::cuda::ResidentQueue;
using kernels::cuda::Task;

static_assert(kernels::cuda::kQueueEntries >= 2 * CudaLane::kMaxNoops);  // no entry is overwritten unread

ResidentLane::~ResidentLane() {
  if (ctas_ != 0) stop();
}

void ResidentLane::follow_share() {
  const std::uint32_t share = device_.lane_sms();
  if (in_flight() != 0 || (ctas_ == share && partition_ == device_.partition())) return;
  if (ctas_ != 0) stop();
  take_stream();
  ctas_ = share;
  CUdeviceptr queue_at = queue();
  CUdeviceptr operations = device_op(0);
  void* arguments[] = {&queue_at, &operations, &next_};
  const CUkernel kernel = device_.kernel(kernels::cuda::kResidentKernel);
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), ctas_, 1, 1, kernels::cuda::kMaxThreads,
                              1, 1,
                              static_cast<unsigned>(device_.max_shared_bytes()) - kernels::cuda::kStaticBytes,
                              stream_, arguments, nullptr));
}

// It has nothing in flight, so it ends as soon as it looks.
void ResidentLane::stop() {
  tell(Task::kStop, 0);
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
  // The kernel leaves without counting the entry.
  const CUdeviceptr left = queue() + offsetof(ResidentQueue, left);
  must("cuStreamWriteValue32", driver_.cuStreamWriteValue32(control(), left, next_, 0));
  let_stream_go();
  ctas_ = 0;
}

void ResidentLane::start(Kind kind, std::uint32_t place) {
  const Operation& staging = host_place(place).staging;
  must("cuMemcpyHtoDAsync",
       driver_.cuMemcpyHtoDAsync(device_op(place), &staging, sizeof(Operation), control()));
  tell(kernels::cuda::task_of(kind, staging), place);
}

void ResidentLane::tell(Task task, std::uint32_t place) {
  const CUdeviceptr at = queue() + offsetof(ResidentQueue, entries) +
                         next_ % kernels::cuda::kQueueEntries * sizeof(std::uint64_t);
  must("cuStreamWriteValue64",
       driver_.cuStreamWriteValue64(control(), at, kernels::cuda::queue_entry(next_, task, place), 0));
  ++next_;
}

}  // namespace epd
