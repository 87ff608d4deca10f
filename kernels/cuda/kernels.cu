// The entry points: one launch is one operation, or stays and runs what it is told. Device code only; their
// names are kKernelNames.
#include "cuda/expand.cuh"
#include "cuda/partial_sums.cuh"
#include "cuda/resident.cuh"

namespace epd::kernels::cuda {

extern __shared__ __align__(128) std::uint8_t dynamic_memory[];

// The CTA's own copy of the operation. All threads call.
__device__ inline Operation& fetch(const Operation* from) {
  static_assert(sizeof(Operation) % 16 == 0);
  static_assert(sizeof(Operation) + sizeof(Watch) + 512 + 1024 <= kStaticBytes);
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  const auto* const source = reinterpret_cast<const uint4*>(from);
  // For bulk copies into stages that it asks for before anybody has used these (OwnRows). Takes as long as the
  // trip.
  if (warp_of() == herald_warp()) fence_async();
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(copy)[i] = __ldcg(source + i);
  }
  __syncthreads();
  return *reinterpret_cast<Operation*>(copy);
}

__device__ inline CommandTurn load_turn(const Herald& herald) {
  union {
    uint4 words[3];
    CommandTurn turn;
  } loaded;
  static_assert(sizeof(loaded.words) == sizeof(loaded.turn));
  const auto* const from = reinterpret_cast<const uint4*>(&herald.turn);
  for (std::uint32_t i = 0; i < 3; ++i) loaded.words[i] = __ldcg(from + i);
  return loaded.turn;
}

// The same of a program, as its command has it. The turn comes from L2 together with the operation; to patch
// the copy takes no further trip. All threads call.
__device__ inline const Operation& fetch_command(const ResidentArguments& own, std::uint32_t program) {
  const Program& from = own.commands.programs[program];
  const bool patches_peer = threadIdx.x < kMaxRanks;
  const bool patches_rest = threadIdx.x == kMaxRanks;
  CommandTurn turn{};
  std::uint64_t since = 0;
  if (patches_peer || patches_rest) turn = load_turn(own.state->herald);
  if (patches_peer) since = __ldcg(from.since + threadIdx.x);
  Operation& op = fetch(&from.op);
  if (patches_peer) patch_peer(op.peers[threadIdx.x], turn, own.commands, since);
  if (patches_rest) patch_operation(op, turn, own.commands);
  __syncthreads();
  return op;
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

extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    epd_resident(const __grid_constant__ ResidentArguments own) {
  __shared__ Watch watch;  // CTA 0
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_watch(own, watch);
  for (std::uint32_t herald = first_herald(*own.state);; ++herald) {
    const Entry entry = next_entry(own, watch, herald);
    if (entry.task == Task::kStop) {
      leave_kernel(*own.state, herald);
      return;
    }
    const Operation& op =
        entry.by_command ? fetch_command(own, entry.place) : fetch(own.operations + entry.place);
    if (!entry.failed) run_task(entry.task, op, {blockIdx.x, op.movers.ctas}, dynamic_memory);
    const Leaving left = leave(op, gridDim.x);
    if (left.last && threadIdx.x == 0)
      store_release(&own.state->left, std::uint64_t{left.failed} << 32 | (herald + 1));
  }
}

extern "C" __global__ void epd_pulse() {}

}  // namespace epd::kernels::cuda
