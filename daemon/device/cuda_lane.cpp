#include "cuda_lane.h"

#include "base/clock.h"

#include <sched.h>
#include <algorithm>

namespace epd {

using kernels::cuda::Kind;
using kernels::cuda::Operation;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHostAlign = 256;
constexpr std::uint64_t kLookAtStreamNs = 1'000'000;

constexpr std::size_t aligned(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

}  // namespace

class CudaFlight final : public Flight {
 public:
  CudaFlight(CudaLane& lane, const LaunchRequest& request, std::uint64_t tag)
      : lane_(lane), place_(request.place), signal_(request.signal), tag_(tag) {
    ++lane_.in_flight_;
  }

  ~CudaFlight() override {
    if (!ended()) abort();
    while (!ended()) ::sched_yield();  // it leaves within microseconds of its start, or the GPU has failed
    if (result().error != OpError::kNone) lane_.dirty_ = true;
    --lane_.in_flight_;
  }

  bool counted() override { return tag_at(lane_.host_place(place_).counted); }

  bool ended() override {
    if (tag_at(lane_.host_place(place_).result.tag)) return true;
    // Of a GPU that has failed nothing comes any more.
    const std::uint64_t now = MonotonicClock().now_ns();
    if (now - looked_ns_ >= kLookAtStreamNs) {
      looked_ns_ = now;
      const CUresult state = lane_.driver_.cuStreamQuery(lane_.stream_);
      if (state != CUDA_ERROR_NOT_READY) lane_.must("cuStreamQuery", state);
    }
    return false;
  }

  bool left() override {
    if (!ended()) return false;
    if (result().error == OpError::kNone) return true;
    const CUresult state = lane_.driver_.cuStreamQuery(lane_.stream_);
    if (state != CUDA_ERROR_NOT_READY) lane_.must("cuStreamQuery", state);
    return state == CUDA_SUCCESS;
  }

  std::span<const std::int32_t> counts() const override {
    return {lane_.placement(place_), lane_.shape_.placement_words};
  }
  const OpResult& result() const override { return lane_.host_place(place_).result; }

  void abort() override {
    std::atomic_ref abort(lane_.host_place(place_).abort);
    if (abort.exchange(1) != 0) return;
    const CUstream control = lane_.device_.partition()->control();
    if (signal_.ready != nullptr) lane_.write_word(control, signal_.ready, signal_.value);
    lane_.free_passes();
  }

 private:
  bool tag_at(std::uint64_t& word) const {
    return std::atomic_ref(word).load(std::memory_order_acquire) == tag_;
  }

  CudaLane& lane_;
  const std::uint32_t place_;
  const StreamSignal signal_;
  const std::uint64_t tag_;
  std::uint64_t looked_ns_ = MonotonicClock().now_ns();
};

CudaLane::CudaLane(CudaDevice& device, const LaneShape& shape)
    : device_(device), driver_(device.driver()), shape_(shape) {}

Result<std::unique_ptr<Lane>> CudaLane::open(CudaDevice& device, const LaneShape& shape) {
  Operation probe;
  probe.shape = shape.shape;
  for (std::uint32_t i = 0; i < shape.num_biases; ++i)
    probe.bias[i] = reinterpret_cast<std::uint16_t*>(kLine);
  for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    if (kernels::cuda::configure(kind, device.max_shared_bytes(), device.max_sms(), probe)) continue;
    return Status(StatusCode::kUnsupported,
                  device.name() + " can't hold rows of " + std::to_string(shape.shape.format.row_bytes) +
                      " bytes of " + std::to_string(shape.shape.num_ranks) + " ranks in the " +
                      std::to_string(device.max_shared_bytes()) + " bytes of an SM's shared memory");
  }
  std::unique_ptr<CudaLane> lane(new CudaLane(device, shape));
  if (Status status = lane->allocate(); !status.ok()) return status;
  return std::unique_ptr<Lane>(std::move(lane));
}

Status CudaLane::allocate() {
  host_stride_ = aligned(sizeof(HostPlace) + shape_.placement_words * sizeof(std::int32_t), kHostAlign);
  workspace_bytes_ = kernels::cuda::workspace_bytes(shape_.shape, device_.max_sms());
  const std::size_t before = shape_.depth * aligned(sizeof(Operation), kLine);
  Result<LaneMemory> memory = device_.take_memory(before + workspace_bytes_, host_stride_ * shape_.depth);
  if (!memory.ok()) return memory.status();
  memory_ = *memory;
  std::fill_n(memory_.host, host_stride_ * shape_.depth, std::byte{0});
  workspace_ = memory_.device + before;
  device_.clear(reinterpret_cast<void*>(memory_.device), before + workspace_bytes_);
  follow_partition();
  return {};
}

CudaLane::~CudaLane() {
  if (stream_ != nullptr) {
    free_passes();
    // Both may still write into arenas that are unmapped next.
    must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
    must("cuStreamSynchronize", driver_.cuStreamSynchronize(device_.partition()->control()));
    let_stream_go();
    device_.lane_closed();
  }
  if (memory_.device != 0) device_.give_back(memory_);
}

CUdeviceptr CudaLane::device_op(std::uint32_t place) const {
  return memory_.device + place * aligned(sizeof(Operation), kLine);
}

void CudaLane::follow_partition() {
  if (partition_ == device_.partition() || in_flight_ != 0) return;
  if (stream_ != nullptr) {
    // What has ended may still have its last word to write, and passes may wait.
    const CUresult state = driver_.cuStreamQuery(stream_);
    if (state == CUDA_ERROR_NOT_READY) return;
    must("cuStreamQuery", state);
    let_stream_go();
  }
  int least = 0;
  int greatest = 0;  // the smaller number
  must("cuCtxGetStreamPriorityRange", driver_.cuCtxGetStreamPriorityRange(&least, &greatest));
  partition_ = device_.partition();
  stream_priority_ = std::clamp(-shape_.priority, greatest, least);
  stream_ = partition_->take_stream(stream_priority_);
}

void CudaLane::let_stream_go() {
  partition_->give_back(stream_, stream_priority_);
  stream_ = nullptr;
}

// The lane's own part of the operation.
void CudaLane::prepare(const LaunchRequest& request) {
  Operation& op = *request.op;
  HostPlace& host = host_place(request.place);
  op.workspace = reinterpret_cast<void*>(workspace_);
  op.abort = &host.abort;
  op.result = &host.result;
  if (request.kind == Kind::kDispatch) {
    op.counts.host_placement = placement(request.place);
    op.counts.host_ready = &host.counted;
  }
  const std::uint32_t share = device_.lane_sms();
  const std::uint32_t sms = request.sms == 0 ? share : std::min(request.sms, share);
  EPD_CHECK(kernels::cuda::configure(request.kind, device_.max_shared_bytes(), sms, op));
  host.result.tag = 0;
  host.counted = 0;
  host.abort = 0;
  host.staging = op;
}

std::unique_ptr<Flight> CudaLane::launch(const LaunchRequest& request) {
  follow_partition();
  prepare(request);
  const Operation& op = *request.op;
  if (dirty_ && in_flight_ == 0) {
    must("cuMemsetD8Async", driver_.cuMemsetD8Async(workspace_, 0, workspace_bytes_, stream_));
    dirty_ = false;
  }
  // What the record held is overwritten from now on; if this engine dies meanwhile, nobody may take it for a
  // routing.
  if (op.routing.head != nullptr) {
    must("cuStreamWriteValue64",
         driver_.cuStreamWriteValue64(stream_, address(&op.routing.head->handle), 0, 0));
  }
  must("cuMemcpyHtoDAsync",
       driver_.cuMemcpyHtoDAsync(device_op(request.place), &host_place(request.place).staging,
                                 sizeof(Operation), stream_));
  const StreamSignal& signal = request.signal;
  if (signal.ready != nullptr) {
    passing_.erase(signal.ready);  // who frees this one frees the earlier too
    must("cuStreamWaitValue32",
         driver_.cuStreamWaitValue32(stream_, address(signal.ready), signal.value, CU_STREAM_WAIT_VALUE_GEQ));
  }
  CUdeviceptr on_device = device_op(request.place);
  void* arguments[] = {&on_device};
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(device_.kernel(request.kind, op)), op.movers.ctas,
                              1, 1, op.movers.threads, 1, 1, op.movers.shared_bytes, stream_, arguments,
                              nullptr));
  if (signal.done != nullptr) write_word(stream_, signal.done, signal.value);
  return std::make_unique<CudaFlight>(*this, request, op.tag);
}

void CudaLane::write_word(CUstream stream, const void* word, std::uint32_t value) const {
  must("cuStreamWriteValue32", driver_.cuStreamWriteValue32(stream, address(word), value, 0));
}

void CudaLane::pass(const StreamSignal& signal) {
  follow_partition();
  passing_[signal.ready] = signal;
  must("cuStreamWaitValue32",
       driver_.cuStreamWaitValue32(stream_, address(signal.ready), signal.value, CU_STREAM_WAIT_VALUE_GEQ));
  write_word(stream_, signal.done, signal.value);
}

void CudaLane::free_passes() {
  for (const auto& [word, signal] : passing_) write_word(device_.partition()->control(), word, signal.value);
  passing_.clear();
}

// A word that falls back makes a stream wait for ever. So this comes behind what operations before it still
// have to write there, and is left out if a later one was released already.
void CudaLane::release(const StreamSignal& signal) {
  const auto [last, first] = released_.try_emplace(signal.done, signal.value);
  if (!first && static_cast<std::int32_t>(signal.value - last->second) <= 0) return;
  last->second = signal.value;
  follow_partition();
  write_word(stream_, signal.done, signal.value);
}

}  // namespace epd
