// The entry points of the kernels. A gate takes a call, and the main kernel after it carries the call out.
// kKernelNames lists the names.
#include "cuda/algorithms.cuh"
#include "cuda/workers/main.cuh"
#include "kernels/cuda.h"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation.
__device__ inline Operation& own_operation() {
  __shared__ alignas(16) std::uint8_t memory[sizeof(Operation)];
  return *reinterpret_cast<Operation*>(memory);
}
static_assert(sizeof(Operation) + sizeof(ViewCopy) + sizeof(Work) + 512 + 1024 <= kStaticBytes);

// Registers of the main kernel and of a gate. A gate of another lane fits beside a CTA of a main kernel, and
// so does a client's waiting kernel: 512 threads of 128 registers would take all of an SM.
inline constexpr int kMainRegisters = 112;
inline constexpr int kGateRegisters = 64;

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
  if (threadIdx.x != 0) return;
  if (look == Look::kTaken) {
    tell_begun(own, gate);
    leave_to_main(own);
  } else {
    leave_gate(own, gate, look);
  }
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
      if (compose_work(own, work, view, own_operation())) {
        run_task(work.task, own_operation(), dynamic_memory);
      } else if (threadIdx.x == 0) {
        fail_unbegun(own_operation());
      }
      leave_call(own, work, own_operation());
    }
    if (work.lingering == 0) return;
  }
}

extern "C" __global__ void epd_launch_probe() {}

}  // namespace epd::kernels::cuda
