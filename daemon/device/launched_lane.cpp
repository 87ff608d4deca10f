#include "launched_lane.h"

#include <atomic>

namespace epd {

LaunchedLane::~LaunchedLane() {
  if (stream_ == nullptr) return;
  // What has ended may still be leaving.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
  let_stream_go();
}

// A share is asked for with each operation; only another partition needs another stream.
void LaunchedLane::follow_share() {
  if (partition_ == device_.partition() || in_flight() != 0) return;
  if (stream_ != nullptr) {
    const CUresult state = driver_.cuStreamQuery(stream_);
    if (state == CUDA_ERROR_NOT_READY) return;
    must("cuStreamQuery", state);
    let_stream_go();
  }
  take_stream();
}

// The stream waits for the client and not the kernel: until then its SMs are for others.
void LaunchedLane::start(Kind kind, std::uint32_t place) {
  Operation& op = given(place);
  const Signal signal = op.signal;
  op.signal.ready = nullptr;
  if (client_words_pending()) {
    must("cuStreamWaitValue32",
         driver_.cuStreamWaitValue32(stream_, reinterpret_cast<CUdeviceptr>(client_words_written()),
                                     client_words(), CU_STREAM_WAIT_VALUE_GEQ));
  }
  if (kind != Kind::kNoop) {
    must("cuMemcpyHtoDAsync", driver_.cuMemcpyHtoDAsync(device_op(place), &op, sizeof(Operation), stream_));
  }
  if (signal.ready != nullptr) {
    must("cuStreamWaitValue32",
         driver_.cuStreamWaitValue32(stream_, reinterpret_cast<CUdeviceptr>(signal.ready), signal.value,
                                     CU_STREAM_WAIT_VALUE_GEQ));
  }
  if (kind == Kind::kNoop) {
    if (signal.done != nullptr) {
      must("cuStreamWriteValue32", driver_.cuStreamWriteValue32(
                                       stream_, reinterpret_cast<CUdeviceptr>(signal.done), signal.value, 0));
    }
    must("cuStreamWriteValue64",
         driver_.cuStreamWriteValue64(stream_, reinterpret_cast<CUdeviceptr>(&host_place(place).result.tag),
                                      op.tag, 0));
    return;
  }
  const kernels::cuda::Movers& movers = op.movers;
  CUdeviceptr on_device = device_op(place);
  void* arguments[] = {&on_device};
  const CUkernel kernel = device_.kernel(kernels::cuda::kernel_name(kind, op));
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), movers.ctas, 1, 1, movers.threads, 1, 1,
                              movers.shared_bytes, stream_, arguments, nullptr));
}

void LaunchedLane::abort(std::uint32_t place, const Signal& signal) {
  std::atomic_ref(host_place(place).abort).store(1);
  if (signal.ready != nullptr) write_client_word(signal.ready, signal.value);
}

}  // namespace epd
