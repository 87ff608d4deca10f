#include "resident_lane.h"

#include <cstddef>

namespace epd {

using kernels::cuda::ResidentArguments;
using kernels::cuda::ResidentState;
using kernels::cuda::Task;

static_assert(kernels::cuda::kQueueEntries >= 2 * CudaLane::kMaxNoops);  // no entry is overwritten unread

ResidentLane::ResidentLane(CudaDevice& device, const LaneShape& shape)
    : CudaLane(device, shape), aborted_(num_places(), false) {}

ResidentLane::~ResidentLane() {
  if (ctas_ != 0) stop();
}

void ResidentLane::follow_share() {
  const std::uint32_t share = device_.lane_sms(*this);
  if (in_flight() != 0 || (ctas_ == share && partition_ == device_.partition())) return;
  if (ctas_ != 0) stop();
  take_stream();
  ctas_ = share;
  ResidentArguments own{reinterpret_cast<ResidentState*>(extra_device()),
                        reinterpret_cast<Operation*>(device_op(0)), &given(0), next_};
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
  const CUdeviceptr at = extra_device() + offsetof(ResidentState, entries) +
                         next_ % kernels::cuda::kQueueEntries * sizeof(std::uint64_t);
  must("cuStreamWriteValue64",
       driver_.cuStreamWriteValue64(control(), at, kernels::cuda::queue_entry(next_, task, place), 0));
  ++next_;
}

// ---- abort words, behind the state

std::size_t ResidentLane::extra_device_bytes() const {
  return sizeof(ResidentState) + num_places() * sizeof(std::uint32_t);
}

const std::uint32_t* ResidentLane::abort_word(std::uint32_t place) const {
  return reinterpret_cast<const std::uint32_t*>(extra_device() + sizeof(ResidentState)) + place;
}

// In the control stream, and so before the operation's entry.
void ResidentLane::clear_abort(std::uint32_t place) {
  if (aborted_[place]) write_word(abort_word(place), 0);
  aborted_[place] = false;
}

void ResidentLane::abort(std::uint32_t place, const Signal&) {
  write_word(abort_word(place), 1);
  aborted_[place] = true;
}

}  // namespace epd
