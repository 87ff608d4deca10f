#include "cuda_lane.h"

#include <algorithm>
#include <utility>

namespace epd::device {

using kernels::cuda::Kind;

CudaLane::CudaLane(CudaDevice& device, const LaneShape& shape)
    : device_(device),
      driver_(device.driver()),
      shape_(shape),
      signals_(device, shape_),
      priority_(shape.priority) {}

void CudaLane::set_priority(std::int32_t priority) {
  if (std::exchange(priority_, priority) != priority) device_.share_anew();
}

// Whether an SM's shared memory has room for such operations, however many SMs one gets.
bool CudaLane::fits(const kernels::cuda::Shape& shape) const {
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

Status CudaLane::allocate() {
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
  const std::size_t device_bytes = workspace_bytes_ + own_device_bytes();
  const std::size_t signals_at = aligned(own_host_bytes());
  Result<LaneMemory> memory = device_.take_memory(device_bytes, signals_at + signals_.host_bytes());
  if (!memory.ok()) return memory.status();
  memory_ = *memory;
  std::fill_n(memory_.host, memory_.host_bytes, std::byte{0});
  signals_.open(memory_.host + signals_at);
  device_.clear(reinterpret_cast<void*>(memory_.device), device_bytes);
  return {};
}

CudaLane::~CudaLane() {
  // The stream writes words in an arena that is unmapped next.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(control()));
  if (memory_.device != 0 && signals_.under_way()) {
    leave({partition_, nullptr, 0, nullptr, memory_, {}, {}});
  } else if (memory_.device != 0) {
    device_.give_back(memory_);
  }
  device_.lane_closed(this);
}

void CudaLane::describe_workspace(Operation& op) const {
  op.workspace = reinterpret_cast<void*>(memory_.device);
  op.workspace_bytes = workspace_bytes_;
}

void CudaLane::take_stream() {
  int least = 0;
  int greatest = 0;  // of the two, the smaller number
  must("cuCtxGetStreamPriorityRange", driver_.cuCtxGetStreamPriorityRange(&least, &greatest));
  partition_ = device_.partition();
  stream_priority_ = std::clamp(wanted_priority(greatest), greatest, least);
  stream_ = partition_->take_stream(stream_priority_);
}

void CudaLane::let_stream_go() {
  partition_->give_back(stream_, stream_priority_);
  stream_ = nullptr;
}

void CudaLane::leave_running(std::unique_ptr<PairsAhead> pairs, CallPort::Layout calls) {
  leave(
      {partition_, stream_, stream_priority_, std::move(pairs), memory_, std::move(calls), shape_.exchange});
  stream_ = nullptr;
}

void CudaLane::leave(LeavingLane lane) {
  if (signals_.under_way()) lane.exchange = shape_.exchange;
  device_.take_leaving(std::move(lane));
  memory_ = {};
}

void CudaLane::write_word(const void* word, std::uint32_t value) const {
  must("cuStreamWriteValue32",
       driver_.cuStreamWriteValue32(control(), reinterpret_cast<CUdeviceptr>(word), value, 0));
}

}  // namespace epd::device
