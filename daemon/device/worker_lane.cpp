#include "worker_lane.h"

#include <algorithm>
#include <utility>

namespace epd::device {

using kernels::Kind;

namespace {

constexpr std::size_t kAlign = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

WorkerLane::WorkerLane(CudaDevice& device, const LaneShape& shape)
    : device_(device),
      driver_(device.driver()),
      shape_(shape),
      priority_(shape.priority),
      signals_(device, shape_),
      calls_(*this) {}

// A client may make calls as long as its rank is active. The loop does not wait for a main kernel that runs,
// or for the pairs after it: the device keeps what they use until the stream has ended.
WorkerLane::~WorkerLane() {
  LeavingLane leaving;
  calls_.halt();
  if (pairs_ != nullptr) {
    calls_.leave();
    pairs_->end();
    leaving = {stream_, stream_priority_, std::move(pairs_), {}, calls_.layout(), shape_.exchange};
  }
  // The control stream writes words in an arena that is unmapped next.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(device_.control()));
  if (signals_.under_way()) leaving.exchange = shape_.exchange;
  if (memory_.device != 0) {
    leaving.memory = memory_;
    device_.take_leaving(std::move(leaving));
  }
  device_.shares().remove(this);
}

// ---- memory

// Whether an SM's shared memory has space for such operations, however many SMs one gets.
bool WorkerLane::fits(const kernels::Shape& shape) const {
  Operation probe;
  probe.shape = shape;
  probe.inbox = shape_.inbox;
  for (std::uint32_t i = 0; i < shape_.limits.num_biases; ++i)
    probe.bias[i] = reinterpret_cast<std::uint16_t*>(64);
  for (std::uint32_t sms = 1; sms <= device_.max_sms(); ++sms) {
    for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
      if (!kernels::cuda::configure(kind, device_.max_shared_bytes(), sms, probe)) return false;
    }
  }
  return true;
}

Status WorkerLane::allocate() {
  for (std::uint32_t format = 0; format < shape_.limits.num_formats; ++format) {
    if (fits(shape_.with_format(format))) continue;
    std::string what = "rows of " + std::to_string(shape_.with_format(format).format.row_bytes) + " bytes, " +
                       std::to_string(shape_.shape.num_ranks) + " ranks, " +
                       std::to_string(shape_.shape.num_experts) + " experts";
    if (shape_.inbox.max_tokens != 0) what += ", " + std::to_string(shape_.inbox.max_tokens) + " tokens";
    return {StatusCode::kUnsupported, device_.name() + " can't hold " + what + " in the " +
                                          std::to_string(device_.max_shared_bytes()) +
                                          " bytes of an SM's shared memory"};
  }
  workspace_bytes_ = aligned(kernels::cuda::workspace_bytes(shape_.shape, device_.max_sms()));
  const std::size_t device_bytes = workspace_bytes_ + LaneOnDevice::bytes(shape_, device_.max_sms());
  const std::size_t signals_at = aligned(LaneOnHost::bytes(shape_));
  Result<LaneMemory> memory = device_.lane_memory().take(device_bytes, signals_at + signals_.host_bytes());
  if (!memory.ok()) return memory.status();
  memory_ = *memory;
  std::fill_n(memory_.host, memory_.host_bytes, std::byte{0});
  signals_.open(memory_.host + signals_at);
  device_.clear(reinterpret_cast<void*>(memory_.device), device_bytes);
  return {};
}

void WorkerLane::describe_workspace(Operation& op) const {
  op.workspace = reinterpret_cast<void*>(memory_.device);
  op.workspace_bytes = workspace_bytes_;
}

void WorkerLane::write_word(const void* word, std::uint32_t value) const {
  must("cuStreamWriteValue32",
       driver_.cuStreamWriteValue32(device_.control(), reinterpret_cast<CUdeviceptr>(word), value, 0));
}

// ---- pairs

// A GPU that is busy looks at a wait within some 4 us if its stream has the highest priority, else within
// 100 us.
void WorkerLane::take_stream() {
  int least = 0;
  int greatest = 0;  // of the two, the smaller number
  must("cuCtxGetStreamPriorityRange", driver_.cuCtxGetStreamPriorityRange(&least, &greatest));
  stream_priority_ = std::min(shape_.priority < 0 ? greatest + 1 : greatest, least);
  stream_ = device_.streams().take(stream_priority_);
}

void WorkerLane::start_pairs() {
  take_stream();
  PairKernels kernels;
  kernels.context = device_.context();
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
  return ctas() - std::min(ctas(), device_.shares().guaranteed(*this));
}

void WorkerLane::set_priority(std::int32_t priority) {
  if (std::exchange(priority_, priority) != priority) device_.shares().apply();
}

void WorkerLane::follow_share() {
  calls_.guarantee(device_.shares().guaranteed(*this));
  if (pairs_ != nullptr) pairs_->set_sms(ctas(), asked_sms());
}

void WorkerLane::drain(bool drains) {
  if (pairs_ == nullptr) return;
  if (drains) pairs_->pause();
  calls_.drain(drains);
  if (!drains) pairs_->go_on();
}

bool WorkerLane::is_drained() const {
  return pairs_ == nullptr || (pairs_->is_paused() && device_.is_idle(stream_));
}

void WorkerLane::advance() {
  if (pairs_ != nullptr && pairs_->failed_call() != nullptr) must(pairs_->failed_call(), pairs_->failure());
}

}  // namespace epd::device
