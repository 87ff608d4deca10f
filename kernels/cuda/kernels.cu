// The entry points of the kernels. A launched kernel runs one operation. A gate takes a call, and the main
// kernel behind it carries the call out. kKernelNames lists the names.
#include "cuda/algorithms.cuh"
#include "cuda/workers/main.cuh"
#include "kernels/cuda.h"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation. All kernels use the same shared variable, so the compiler knows its
// address. With a variable for each kernel, a combine of 128 tokens took 10 % longer.
__device__ inline Operation& own_operation() {
  __shared__ alignas(16) std::uint8_t memory[sizeof(Operation)];
  return *reinterpret_cast<Operation*>(memory);
}
static_assert(sizeof(Operation) + sizeof(ViewCopy) + sizeof(Work) + 512 + 1024 <= kStaticBytes);

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
// Those of the main kernel and of a gate. A gate of another lane fits beside a CTA of a main kernel.
inline constexpr int kMainRegisters = 112;
inline constexpr int kGateRegisters = 64;

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
__device__ __noinline__ inline void worker_dispatch(Operation& op, Cta cta, std::uint8_t* memory) {
  run_dispatch(op, cta, memory);
}
template <bool kPerExpert>
__device__ __noinline__ inline void worker_combine(Operation& op, Cta cta, std::uint8_t* memory) {
  run_combine<kPerExpert>(op, cta, memory);
}

// Runs one CTA's part of a call's operation.
__device__ inline void run_task(Task task, Operation& op, std::uint8_t* memory) {
  const Cta cta{blockIdx.x, op.division.ctas};
  if (is_low_latency(op)) {
    if (task == Task::kDispatch) run_low_latency_dispatch(op, memory);
    if (task == Task::kCombinePerExpert) run_low_latency_combine(op, memory);
    return;
  }
  if (task == Task::kDispatch) worker_dispatch(op, cta, memory);
  if (task == Task::kCombine) worker_combine<false>(op, cta, memory);
  if (task == Task::kCombinePerExpert) worker_combine<true>(op, cta, memory);
}

// One warp. The main kernel may begin as soon as it is known that calls run: the view stays as it is from
// then on.
extern "C" __global__ void __maxnreg__(kGateRegisters) epd_gate(const __grid_constant__ WorkerArguments own) {
  __shared__ Gate gate;
  if (enter(own, gate, 0, own.asked_sms)) let_dependents_begin();
  Look look = Look::kNothing;
  if (threadIdx.x == 0) look = decide(own, gate);
  __syncwarp();
  hand_over(own, gate, own.number);
  keep(own, gate);
  __syncwarp();
  if (threadIdx.x == 0 && look != Look::kTaken) leave_gate(own, gate, look);
}

// The last CTA to leave a call's operation concludes the call. In a main kernel that lingers, it looks for
// the next one.
__device__ __forceinline__ void leave_call(const WorkerArguments& own, const Work& work,
                                           const Operation& op) {
  const Leaving left = leave(op, work.ctas);
  if (left.last && threadIdx.x == 0) {
    const ResultRuns runs = runs_of(own.calls, work.call.result);
    await_kernel_before();
    conclude(own, work, left.failed, runs);
  }
  if (left.last && work.lingering != 0 && warp_of() == 0)
    linger(own, *reinterpret_cast<Gate*>(dynamic_memory), work);
}

// Receives the next work. Returns whether it is for this CTA. A CTA of the main kernel may begin before
// the gate has ended. It copies the view meanwhile, which no call uses if it is not its own.
__device__ __forceinline__ bool receive(const WorkerArguments& own, Work& work, ViewCopy& view, bool first) {
  __syncthreads();
  if (warp_of() == 0) {
    await_work(own, first ? own.number : work.number + 1, work);
  } else if (first) {
    copy_view(own, view);
  }
  __syncthreads();
  return work.task != Task::kNone && blockIdx.x < most_ctas(work);
}

extern "C" __global__ void __maxnreg__(kMainRegisters) epd_main(const __grid_constant__ WorkerArguments own) {
  __shared__ alignas(8) std::uint8_t work_memory[sizeof(Work)];
  __shared__ ViewCopy view;
  auto& work = *reinterpret_cast<Work*>(work_memory);
#pragma unroll 1
  for (bool first = true; receive(own, work, view, first); first = false) {
    if (blockIdx.x < work.ctas) {
      compose_work(own, work, view, own_operation());
      run_task(work.task, own_operation(), dynamic_memory);
      leave_call(own, work, own_operation());
    }
    if (work.lingering == 0) return;
  }
}

extern "C" __global__ void epd_launch_probe() {}

}  // namespace epd::kernels::cuda
