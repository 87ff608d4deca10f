// Operations one after the other in one persistent kernel: their times without launch and end, and with
// instructions at hand. The kernel itself flushes L2 before each and lets all ranks start together.
#pragma once

#include "bench/barrier_lines.h"
#include "cuda/algorithms.cuh"
#include "gpu/image.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace epd::gpu_test {

struct ResidentPlan {
  kernels::cuda::Operation* operations;  // [count]
  std::uint32_t count;
  uint4* flush;
  std::uint32_t flush_vectors;
  std::uint32_t* barrier;  // a counter, and on a line of its own how often all have met
  BarrierLines lines;
  std::uint32_t rank;
  std::uint64_t* begin;  // [count] ns
  std::uint64_t* end;    // [count] ns
};

// All CTAs of the rank meet.
__device__ inline void resident_barrier(const ResidentPlan& plan) {
  using namespace kernels::cuda;
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile std::uint32_t* const met = plan.barrier + 32;
    const std::uint32_t before = *met;
    __threadfence();
    if (count_up(plan.barrier, gridDim.x - 1) == gridDim.x - 1) {
      *met = before + 1;
    } else {
      while (*met == before) {
      }
    }
    __threadfence();
  }
  __syncthreads();
}

// And all ranks, each with a line of 64 bytes.
inline constexpr std::uint32_t kLineWords = 8;
__device__ inline void resident_barrier_of_ranks(const ResidentPlan& plan, std::uint32_t i) {
  using namespace kernels::cuda;
  resident_barrier(plan);
  if (blockIdx.x == 0) {
    if (threadIdx.x < plan.lines.count) {
      store_release_system(plan.lines.at[threadIdx.x] + kLineWords * plan.rank, i + 1);
      while (load_acquire_system(plan.lines.at[plan.rank] + kLineWords * threadIdx.x) < i + 1) {
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) plan.begin[i] = nanoseconds();
  }
  resident_barrier(plan);
}

template <kernels::cuda::Kind kKind>
__global__ void __launch_bounds__(kernels::cuda::kMaxThreads, 1) resident_kernel(ResidentPlan plan) {
  using namespace kernels::cuda;
  extern __shared__ __align__(128) std::uint8_t resident_memory[];
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  for (std::uint32_t i = 0; i < plan.count; ++i) {
    const std::uint32_t step = gridDim.x * blockDim.x;
    for (std::uint32_t v = blockIdx.x * blockDim.x + threadIdx.x; v < plan.flush_vectors; v += step) {
      plan.flush[v] = {i, v, 0, 0};
    }
    resident_barrier_of_ranks(plan, i);
    const auto* const source = reinterpret_cast<const uint4*>(plan.operations + i);
    for (std::uint32_t k = threadIdx.x; k < sizeof(Operation) / 16; k += blockDim.x) {
      reinterpret_cast<uint4*>(copy)[k] = __ldcg(source + k);
    }
    __syncthreads();
    auto& op = *reinterpret_cast<Operation*>(copy);
    if constexpr (kKind == Kind::kCombine) {
      run_combine<true>(op, {blockIdx.x, gridDim.x}, resident_memory);
    } else {
      run_dispatch(op, {blockIdx.x, gridDim.x}, resident_memory);
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned long long*>(plan.end + i), nanoseconds());
  }
}

// One rank's part: its operations, and what the kernel needs beside them.
class ResidentRun {
 public:
  static constexpr std::uint32_t kCount = 30;
  static constexpr std::uint32_t kSharedBytes = 227 * 1024;

  ResidentRun(int device, std::uint32_t rank, std::uint32_t sms) : device_(device), sms_(sms) {
    EPD_CUDA(cudaSetDevice(device));
    plan_.rank = rank;
    plan_.count = kCount;
    plan_.flush_vectors = (128u << 20) / 16;
    EPD_CUDA(cudaMalloc(&plan_.operations, kCount * sizeof(kernels::cuda::Operation)));
    EPD_CUDA(cudaMalloc(&plan_.flush, std::size_t{plan_.flush_vectors} * 16));
    std::uint64_t* words = nullptr;
    EPD_CUDA(cudaMalloc(&words, (kWords + 2 * kCount) * 8));
    EPD_CUDA(cudaMemset(words, 0, (kWords + 2 * kCount) * 8));
    plan_.barrier = reinterpret_cast<std::uint32_t*>(words);
    plan_.begin = words + kWords;
    plan_.end = plan_.begin + kCount;
  }
  ~ResidentRun() {
    cudaFree(plan_.operations);
    cudaFree(plan_.flush);
    cudaFree(plan_.barrier);
  }
  ResidentRun(const ResidentRun&) = delete;
  ResidentRun& operator=(const ResidentRun&) = delete;

  void add(const kernels::cuda::Operation& op) { operations_.push_back(op); }
  // All runs are made, and each has its operations.
  void meet(const std::vector<std::unique_ptr<ResidentRun>>& runs) {
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(
        cudaMemcpy(plan_.operations, operations_.data(), kCount * sizeof(operations_[0]), cudaMemcpyDefault));
    plan_.lines.count = static_cast<std::uint32_t>(runs.size());
    for (std::size_t r = 0; r < runs.size(); ++r) plan_.lines.at[r] = runs[r]->plan_.begin - kWords + 64;
    for (const auto kernel :
         {resident_kernel<kernels::cuda::Kind::kDispatch>, resident_kernel<kernels::cuda::Kind::kCombine>}) {
      EPD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDynamicBytes));
    }
    EPD_CUDA(cudaDeviceSynchronize());
  }
  void launch(kernels::cuda::Kind kind, cudaStream_t stream) {
    EPD_CUDA(cudaSetDevice(device_));
    const auto kernel = kind == kernels::cuda::Kind::kDispatch
                            ? resident_kernel<kernels::cuda::Kind::kDispatch>
                            : resident_kernel<kernels::cuda::Kind::kCombine>;
    kernel<<<sms_, kernels::cuda::kMaxThreads, kDynamicBytes, stream>>>(plan_);
    EPD_CUDA(cudaGetLastError());
  }
  // Raises each time to this rank's.
  void most(std::vector<float>& us) const {
    std::vector<std::uint64_t> times(2 * kCount);
    EPD_CUDA(cudaMemcpy(times.data(), plan_.begin, times.size() * 8, cudaMemcpyDefault));
    for (std::uint32_t i = 0; i < kCount; ++i)
      us[i] = std::max(us[i], static_cast<float>(times[kCount + i] - times[i]) * 1e-3f);
  }
  const ResidentPlan& plan() const { return plan_; }

 private:
  static constexpr std::size_t kWords = 256;
  static constexpr int kDynamicBytes = kSharedBytes - kernels::cuda::kStaticBytes;
  int device_;
  std::uint32_t sms_;
  ResidentPlan plan_{};
  std::vector<kernels::cuda::Operation> operations_;
};

}  // namespace epd::gpu_test
