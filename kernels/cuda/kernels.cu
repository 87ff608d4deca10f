// The entry points of the kernels. A launched kernel runs one operation. The resident kernel runs operations
// until it is told to stop. kKernelNames lists the names.
#include "cuda/algorithms.cuh"
#include "cuda/resident/kernel.cuh"
#include "kernels/cuda.h"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation. All kernels use the same shared variable, so the compiler knows its
// address. With a variable for each kernel, a combine of 128 tokens took 10 % longer.
__device__ inline Operation& own_operation() {
  __shared__ alignas(16) std::uint8_t memory[sizeof(Operation)];
  return *reinterpret_cast<Operation*>(memory);
}
static_assert(sizeof(Operation) + sizeof(ViewCopy) + sizeof(Watch) + 512 + 1024 <= kStaticBytes);

// Copies a launched operation from device memory into the CTA's own copy. All threads call.
__device__ inline Operation& fetch(const Operation* from) {
  static_assert(sizeof(Operation) % 16 == 0);
  Operation& copy = own_operation();
  const auto* const source = reinterpret_cast<const uint4*>(from);
  // This fence orders earlier accesses before the bulk copies that the signal warp issues first (OwnRows). It
  // overlaps with the loads.
  if (warp_of() == signal_warp()) fence_async();
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(&copy)[i] = __ldcg(source + i);
  }
  __syncthreads();
  return copy;
}

// The register limit of epd_dispatch. It leaves registers for a client's waiting kernel, as kStaticBytes
// leaves shared memory: 512 threads of 128 registers would take all of an SM.
inline constexpr int kLaunchedRegisters = 120;

extern "C" __global__ void __maxnreg__(kLaunchedRegisters) epd_dispatch(const Operation* op) {
  Operation& own = fetch(op);
  run_dispatch(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine(const Operation* op) {
  Operation& own = fetch(op);
  run_combine<false>(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1) epd_combine_per_expert(const Operation* op) {
  Operation& own = fetch(op);
  run_combine<true>(own, {blockIdx.x, gridDim.x}, dynamic_memory);
  leave(own, gridDim.x);
}

// Not inlined, so that each has a register allocation of its own: together they need more registers than
// there are.
__device__ __noinline__ inline void resident_dispatch(Operation& op, Cta cta, std::uint8_t* memory) {
  run_dispatch(op, cta, memory);
}
template <bool kPerExpert>
__device__ __noinline__ inline void resident_combine(Operation& op, Cta cta, std::uint8_t* memory) {
  run_combine<kPerExpert>(op, cta, memory);
}

// Runs one CTA's part of a call's operation.
__device__ inline void run_task(Task task, Operation& op, Cta cta, std::uint8_t* memory) {
  if (cta.index >= cta.count) return;  // the operation may use fewer SMs than the kernel
  if (is_low_latency(op)) {
    if (task == Task::kDispatch) run_low_latency_dispatch(op, memory);
    if (task == Task::kCombinePerExpert) run_low_latency_combine(op, memory);
    return;
  }
  if (task == Task::kDispatch) resident_dispatch(op, cta, memory);
  if (task == Task::kCombine) resident_combine<false>(op, cta, memory);
  if (task == Task::kCombinePerExpert) resident_combine<true>(op, cta, memory);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    epd_resident(const __grid_constant__ ResidentArguments own) {
  __shared__ Watch watch;  // used by CTA 0 only
  __shared__ TakenCall call;
  __shared__ ViewCopy view;
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_watch(own, watch);
  begin_view(view);
  for (std::uint32_t index = first_broadcast(*own.state);; ++index) {
    const Task task = next_task(own, watch, call, index);
    if (task == Task::kStop) {
      leave_kernel(*own.state, index);
      return;
    }
    compose_call(own.calls, blockIdx.x == 0 ? watch.running : call, view, own_operation());
    Operation& op = own_operation();
    run_task(task, op, {blockIdx.x, op.division.ctas}, dynamic_memory);
    const Leaving left = leave(op, gridDim.x);
    if (left.last && threadIdx.x == 0)
      store_release(&own.state->left, std::uint64_t{left.failed} << 32 | (index + 1));
  }
}

extern "C" __global__ void epd_launch_probe() {}

}  // namespace epd::kernels::cuda
