#include "pairs_ahead.h"

#include "cuda_device.h"
#include "kernels/cuda.h"
#include "proto/call_words.h"

#include <pthread.h>
#include <cstddef>
#include <exception>
#include <string>

namespace epd::device {

namespace {

constexpr std::uint64_t kAnyBell = 0x00000001'00000001;

}  // namespace

Result<std::unique_ptr<PairsAhead>> PairsAhead::make(const CudaDriver& driver, CUstream stream,
                                                     const PairKernels& kernels,
                                                     const kernels::WorkerArguments& arguments) {
  std::unique_ptr<PairsAhead> pairs(new PairsAhead(driver, stream, kernels, arguments));
  for (CUevent& event : pairs->events_) {
    const CUresult result = driver.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuEventCreate", result));
  }
  pairs->set_sms(arguments.ctas, arguments.asked_sms);
  try {
    pairs->thread_ = std::thread([raw = pairs.get()] { raw->run(); });
  } catch (const std::exception& error) {
    return internal_error(std::string("no thread for kernels ahead: ") + error.what());
  }
  return pairs;
}

PairsAhead::~PairsAhead() {
  end();
  if (thread_.joinable()) thread_.join();
  for (const CUevent event : events_) {
    if (event != nullptr) cuda_must(driver_, "cuEventDestroy", driver_.cuEventDestroy(event));
  }
}

void PairsAhead::end() {
  ends_.store(true, std::memory_order_relaxed);
  go_on();
}

void PairsAhead::go_on() {
  paused_.store(false, std::memory_order_release);
  paused_.notify_one();
}

void PairsAhead::stand_while_paused() {
  if (!paused_.load(std::memory_order_relaxed)) return;
  stands_.store(true, std::memory_order_release);
  paused_.wait(true, std::memory_order_acquire);
  stands_.store(false, std::memory_order_relaxed);
}

bool PairsAhead::went_well(const char* call, CUresult result) {
  if (result == CUDA_SUCCESS) return true;
  failed_call_ = call;
  failure_ = result;
  return false;
}

void PairsAhead::run() {
  ::pthread_setname_np(::pthread_self(), "epd-ahead");
  bool good = went_well("cuCtxSetCurrent", driver_.cuCtxSetCurrent(kernels_.context));
  good = good && enqueue_batch(events_[0]);
  for (std::uint32_t batch = 1; good && !ends_.load(std::memory_order_relaxed); ++batch) {
    good = enqueue_batch(events_[batch % 2]);
    good = good && went_well("cuEventSynchronize", driver_.cuEventSynchronize(events_[(batch - 1) % 2]));
    stand_while_paused();
  }
  ended_.store(true, std::memory_order_release);
}

bool PairsAhead::enqueue_batch(CUevent behind) {
  for (std::uint32_t i = 0; i < kBatch; ++i) {
    if (!enqueue_pair()) return false;
  }
  return went_well("cuEventRecord", driver_.cuEventRecord(behind, stream_));
}

bool PairsAhead::enqueue_pair() {
  const auto bell = reinterpret_cast<CUdeviceptr>(arguments_.calls.words->bell);
  if (!went_well("cuStreamWaitValue64",
                 driver_.cuStreamWaitValue64(stream_, bell, kAnyBell, CU_STREAM_WAIT_VALUE_AND)))
    return false;
  arguments_.ctas = ctas_.load(std::memory_order_relaxed);
  arguments_.asked_sms = asked_.load(std::memory_order_relaxed);
  arguments_.number += kernels::kWorksOfPair;
  void* parameters[] = {&arguments_};
  if (!went_well("cuLaunchKernel",
                 driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernels_.gate), 1, 1, 1,
                                        kernels::cuda::kGateThreads, 1, 1, 0, stream_, parameters, nullptr)))
    return false;
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = arguments_.ctas;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = kernels::kMaxThreads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernels_.main_shared_bytes;
  config.hStream = stream_;
  config.attrs = &early;
  config.numAttrs = 1;
  return went_well(
      "cuLaunchKernelEx",
      driver_.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernels_.main), parameters, nullptr));
}

}  // namespace epd::device
