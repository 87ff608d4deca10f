#include "resident_lane.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

namespace epd {

using kernels::cuda::ResidentArguments;
using kernels::cuda::ResidentState;
using kernels::cuda::Task;

static_assert(kernels::cuda::kQueueEntries >= 2 * CudaLane::kMaxNoops);  // no entry is overwritten unread

namespace {

constexpr std::size_t kCommandsAlign = 64;
constexpr std::size_t kToldBytes = kernels::cuda::kQueueEntries * sizeof(std::uint64_t);
static_assert(kToldBytes % kCommandsAlign == 0);

}  // namespace

ResidentLane::ResidentLane(CudaDevice& device, const LaneShape& shape)
    : CudaLane(device, shape), aborted_(num_places(), false) {
  if (shape.commands) commands_ = std::make_unique<ResidentCommands>(*this);
}

// A client may ring as long as its rank is here: the last kernel ends what it runs, and then nobody waits for
// another. The loop does not wait for that kernel: it may not have begun.
ResidentLane::~ResidentLane() {
  if (commands_ != nullptr) commands_->halt();
  if (stream_ == nullptr) return;
  if (runs() && !stopping()) stop();
  leave_running(held_, aside_ ? 0 : told_ns_,
                commands_ != nullptr ? commands_->layout() : CommandPort::Layout{});
}

void ResidentLane::follow_share() {
  if (stopping() || (commands_ != nullptr && !commands_->opened())) return;
  if (stream_ == nullptr) take_stream();
  const std::uint32_t share = device_.lane_sms(*this);
  waits_ = false;
  if (ctas_ == share) return;
  waits_ = share > ctas_ && !device_.has_room(*this, share);
  if (waits_) return;
  held_ = std::max(held_, share);
  if (runs()) {
    ctas_ = share;
    stop();
  } else {
    ctas_ = share;
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
  if (!std::exchange(aside_, false) && round_ == device_.round()) device_.kernel_stopped(told_ns);
  fit_given();  // it may have left some that it was told of
  start_kernel();
  follow_share();  // of what came meanwhile
  return stopping() || waits_;
}

void ResidentLane::start_kernel() {
  held_ = ctas_;
  round_ = device_.round();
  ResidentArguments own{reinterpret_cast<ResidentState*>(extra_device()),
                        reinterpret_cast<Operation*>(device_op(0)),
                        &given(0),
                        &told(0),
                        device_.round_word(),
                        round_,
                        {}};
  if (commands_ != nullptr) own.commands = commands_->arguments();
  void* arguments[] = {&own};
  const CUkernel kernel = device_.kernel(kernels::cuda::kResidentKernel);
  const auto shared = static_cast<unsigned>(device_.max_shared_bytes()) - kernels::cuda::kStaticBytes;
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), ctas_, 1, 1, kernels::cuda::kMaxThreads,
                              1, 1, shared, stream_, arguments, nullptr));
}

// It stops when it has come to this entry; those behind it are the next one's.
void ResidentLane::stop() {
  tell(Task::kStop, round_ % kernels::cuda::kStopRounds);
  told_ns_ = device_.now_ns();
}

// It has seen by itself that it is to leave.
void ResidentLane::follow_round() {
  if (!runs() || stopping() || round_ == device_.round()) return;
  aside_ = true;
  told_ns_ = device_.now_ns();
}

// A kernel that steps aside does not read the entry in the control stream, behind the client's words.
void ResidentLane::start(Kind kind, std::uint32_t place) {
  behind_ = behind_ || client_words_pending();
  tell(kernels::cuda::task_of(kind, given(place)), place);
}

void ResidentLane::tell(Task task, std::uint32_t place) {
  const std::uint64_t entry = kernels::cuda::queue_entry(next_, task, place);
  if (!std::exchange(behind_, false)) std::atomic_ref(told(next_)).store(entry, std::memory_order_release);
  const CUdeviceptr at = extra_device() + offsetof(ResidentState, entries) +
                         next_ % kernels::cuda::kQueueEntries * sizeof(std::uint64_t);
  must("cuStreamWriteValue64", driver_.cuStreamWriteValue64(control(), at, entry, 0));
  ++next_;
}

// What a kernel that steps aside reads: ResidentArguments::told.
std::uint64_t& ResidentLane::told(std::uint32_t entry) const {
  return reinterpret_cast<std::uint64_t*>(extra_host())[entry % kernels::cuda::kQueueEntries];
}

std::byte* ResidentLane::commands_host() const {
  return extra_host() + kToldBytes;
}

// ---- abort words, behind the state

std::size_t ResidentLane::state_bytes() const {
  const std::size_t bytes = sizeof(ResidentState) + num_places() * sizeof(std::uint32_t);
  return (bytes + kCommandsAlign - 1) / kCommandsAlign * kCommandsAlign;
}

std::size_t ResidentLane::extra_device_bytes() const {
  return state_bytes() + (shape_.commands ? ResidentCommands::device_bytes(shape_, device_.max_sms()) : 0);
}

std::size_t ResidentLane::extra_host_bytes() const {
  return kToldBytes + (shape_.commands ? ResidentCommands::host_bytes(shape_) : 0);
}

const std::uint32_t* ResidentLane::abort_word(std::uint32_t place) const {
  return reinterpret_cast<const std::uint32_t*>(extra_device() + sizeof(ResidentState)) + place;
}

// In the control stream, and so before the operation's entry.
void ResidentLane::clear_abort(std::uint32_t place) {
  if (!aborted_[place]) return;
  write_word(abort_word(place), 0);
  aborted_[place] = false;
  behind_ = true;
}

void ResidentLane::abort(std::uint32_t place, const Signal&) {
  write_word(abort_word(place), 1);
  aborted_[place] = true;
}

}  // namespace epd
