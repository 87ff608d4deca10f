#include "resident_lane.h"

#include <atomic>

namespace epd {

using kernels::cuda::ResidentArguments;
using kernels::cuda::ResidentState;
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
  ResidentArguments own{reinterpret_cast<ResidentState*>(extra_device()),
                        reinterpret_cast<Operation*>(device_op(0)), entries(), &given(0), next_};
  void* arguments[] = {&own};
  const CUkernel kernel = device_.kernel(kernels::cuda::kResidentKernel);
  const auto shared = static_cast<unsigned>(device_.max_shared_bytes()) - kernels::cuda::kStaticBytes;
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), ctas_, 1, 1, kernels::cuda::kMaxThreads,
                              1, 1, shared, stream_, arguments, nullptr));
}

// It has nothing in flight, so it ends as soon as it looks.
void ResidentLane::stop() {
  tell(Task::kStop, 0);
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
  let_stream_go();
  ctas_ = 0;
}

void ResidentLane::start(Kind kind, std::uint32_t place) {
  tell(kernels::cuda::task_of(kind, given(place)), place);
}

void ResidentLane::tell(Task task, std::uint32_t place) {
  std::atomic_ref(entries()[next_ % kernels::cuda::kQueueEntries])
      .store(kernels::cuda::queue_entry(next_, task, place), std::memory_order_release);
  ++next_;
}

}  // namespace epd
