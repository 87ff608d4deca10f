// The kernels of libepd. Profilers show their names: epd::dispatch, epd::combine, epd::barrier.
#include "stream_copies.h"

#include <cstdint>

namespace epd {
namespace stream_kernels {
namespace {

// A block of threads, and its shared memory: the step, so that its parameters are read once and by many
// threads, then SharedWords and what is behind them.
class CudaBlock {
 public:
  __device__ CudaBlock(unsigned char* memory, std::uint32_t threads)
      : shared_(*reinterpret_cast<SharedWords*>(memory + sizeof(StagedStep))) {
    if (threadIdx.x == 0) {
      shared_.sums = reinterpret_cast<std::uint32_t*>(memory + sizeof(StagedStep) + sizeof(SharedWords));
      shared_.ends = shared_.sums + threads;
    }
  }
  __device__ std::uint32_t index() const { return blockIdx.x; }
  __device__ std::uint32_t count() const { return gridDim.x; }
  __device__ std::uint32_t thread() const { return threadIdx.x; }
  __device__ std::uint32_t threads() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ SharedWords& shared() const { return shared_; }

 private:
  SharedWords& shared_;
};

// The block of a FewStep.
class SmallBlock {
 public:
  __device__ std::uint32_t thread() const { return threadIdx.x; }
  __device__ std::uint32_t threads() const { return kFewThreads; }
  __device__ void sync() const { __syncthreads(); }
};

__device__ inline void run_kernel(const StagedStep& given) {
  if (given.staging == nullptr) return run(static_cast<const Step&>(given));
  extern __shared__ __align__(16) unsigned char memory[];
  // A lane at a time reads another line of constant memory: so few lines for each warp.
  auto* const to = reinterpret_cast<std::uint32_t*>(memory);
  const auto* const from = reinterpret_cast<const std::uint32_t*>(&given);
  for (std::uint32_t i = threadIdx.x; i < sizeof(StagedStep) / 4; i += blockDim.x) to[i] = from[i];
  const CudaBlock block(memory, blockDim.x);
  __syncthreads();
  run(*reinterpret_cast<const StagedStep*>(memory), block);
}

}  // namespace
}  // namespace stream_kernels

// Runs on one thread.
__global__ void __launch_bounds__(1) dispatch(const __grid_constant__ stream_kernels::Step step) {
  stream_kernels::run(step);
}
__global__ void __launch_bounds__(1) combine(const __grid_constant__ stream_kernels::Step step) {
  stream_kernels::run(step);
}
// A noop copies nothing.
__global__ void __launch_bounds__(1) barrier(const __grid_constant__ stream_kernels::Step step) {
  stream_kernels::run(step);
}

__global__ void __launch_bounds__(stream_kernels::kFewThreads)
    dispatch(const __grid_constant__ stream_kernels::FewStep step) {
  stream_kernels::run(step, stream_kernels::SmallBlock());
}
__global__ void __launch_bounds__(stream_kernels::kFewThreads)
    combine(const __grid_constant__ stream_kernels::FewStep step) {
  stream_kernels::run(step, stream_kernels::SmallBlock());
}

__global__ void __launch_bounds__(stream_kernels::kCopyThreads)
    dispatch(const __grid_constant__ stream_kernels::StagedStep step) {
  stream_kernels::run_kernel(step);
}
__global__ void __launch_bounds__(stream_kernels::kCopyThreads)
    combine(const __grid_constant__ stream_kernels::StagedStep step) {
  stream_kernels::run_kernel(step);
}

}  // namespace epd
