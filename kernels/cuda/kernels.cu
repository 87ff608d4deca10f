// The entry points: one launch is one operation, or stays and runs what it is told. Device code only; their
// names are kKernelNames.
#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"
#include "cuda/resident.cuh"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation. All threads call.
__device__ inline const Operation& fetch(const Operation* from) {
  static_assert(sizeof(Operation) % 16 == 0);
  static_assert(sizeof(Operation) + 512 + 1024 <= kStaticBytes);
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  const auto* const source = reinterpret_cast<const uint4*>(from);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(copy)[i] = __ldcg(source + i);
  }
  __syncthreads();
  return *reinterpret_cast<const Operation*>(copy);
}

// Registers for a client's waiting kernel are left over, as shared memory is (kStaticBytes): 512 threads of
// 128 would take all of an SM.
inline constexpr int kLaunchedRegisters = 120;

extern "C" __global__ void __maxnreg__(kLaunchedRegisters) epd_dispatch(const Operation* op) {
  const Operation& own = fetch(op);
  run_dispatch(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine(const Operation* op) {
  const Operation& own = fetch(op);
  run_combine<false>(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine_per_expert(const Operation* op) {
  const Operation& own = fetch(op);
  run_combine<true>(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_resident(const ResidentArguments own) {
  for (std::uint32_t index = own.first;; ++index) {
    const Entry entry = next_entry(own, index);
    if (entry.task == Task::kStop) return;
    const Operation& op = fetch(own.operations + entry.place);
    if (wait_ready(op)) run_task(entry.task, op, {blockIdx.x, op.movers.ctas}, dynamic_memory);
    if (leave(op, gridDim.x) && threadIdx.x == 0) store_release(&own.state->left, index + 1);
  }
}

}  // namespace epd::kernels::cuda
