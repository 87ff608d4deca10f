// One launch is one operation; how shared memory is divided for it.
#include "cuda/combine.cuh"
#include "cuda/dispatch.cuh"

#include <algorithm>

namespace epd::kernels::cuda {
namespace {

// All threads of the CTA.
__device__ inline void fetch(const Operation* from, Operation& to) {
  static_assert(sizeof(Operation) % 16 == 0);
  const auto* const source = reinterpret_cast<const uint4*>(from);
  for (std::uint32_t i = threadIdx.x; i < sizeof(Operation) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(&to)[i] = __ldcg(source + i);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kMaxThreads, 1) dispatch_kernel(const Operation* op) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  Operation& own = *reinterpret_cast<Operation*>(copy);
  fetch(op, own);
  run_dispatch(own, {blockIdx.x, gridDim.x}, memory);
}

template <bool kPerExpert>
__global__ void __launch_bounds__(kMaxThreads, 1) combine_kernel(const Operation* op) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  __shared__ alignas(16) std::uint8_t copy[sizeof(Operation)];
  Operation& own = *reinterpret_cast<Operation*>(copy);
  fetch(op, own);
  run_combine<kPerExpert>(own, {blockIdx.x, gridDim.x}, memory);
}

const void* kernel_of(Kind kind, bool per_expert) {
  if (kind == Kind::kDispatch) return reinterpret_cast<const void*>(&dispatch_kernel);
  return per_expert ? reinterpret_cast<const void*>(&combine_kernel<true>)
                    : reinterpret_cast<const void*>(&combine_kernel<false>);
}

constexpr std::uint32_t round_to(std::uint32_t value, std::uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr std::uint32_t kMaxWarps = kMaxThreads / 32;
constexpr std::uint32_t kClerks = 2;              // at least, in dispatch: warps that move no rows
constexpr std::uint32_t kStaticBytes = 5 * 1024;  // for the operation's copy, a few words, and the driver
static_assert(sizeof(Operation) + 512 + 1024 <= kStaticBytes);
constexpr std::uint32_t kCombineStage = 8 * 1024;  // a stage of combine: a piece of each row of a token
constexpr std::uint32_t kPieceUnit = 512;          // 16 bytes for each lane

// A stage holds one row with its scales. Of a row that is cast it holds both forms, so that the next can come
// while the last one leaves.
void divide_stages(Operation& op) {
  const RowFormat& format = op.shape.format;
  op.movers.stages = 1;
  op.movers.stage_bytes =
      format.row_bytes + round_to(format.scale_bytes, 128) + (format.cast ? format.x_bytes : 0);
  op.movers.stage_bytes = round_to(op.movers.stage_bytes, 128);
}

// A stage holds a piece of every row that a token may have.
void divide_rows(Operation& op) {
  const Shape& shape = op.shape;
  const std::uint32_t rows = (shape.per_expert ? shape.topk : std::min(shape.topk, shape.num_ranks)) + 2;
  const std::uint32_t wanted = rows - (op.bias[0] == nullptr) - (op.bias[1] == nullptr);
  const std::uint32_t row_bytes = shape.hidden * 2;
  const std::uint32_t most = std::max(kCombineStage / wanted / kPieceUnit * kPieceUnit, kPieceUnit);
  const std::uint32_t pieces = (row_bytes + most - 1) / most;
  op.movers.chunk_bytes = std::min(round_to((row_bytes + pieces - 1) / pieces, kPieceUnit), row_bytes);
  op.movers.stage_bytes = round_to(op.movers.chunk_bytes * wanted, 128);
}

}  // namespace

std::size_t workspace_bytes(const Shape& shape, std::uint32_t max_sms) {
  const std::size_t targets = shape.per_expert ? shape.num_experts : shape.num_ranks;
  return kWorkspaceHead + (shape.num_ranks + shape.num_experts + max_sms * targets) * sizeof(std::uint32_t);
}

bool configure(Kind kind, std::size_t max_shared_bytes, std::uint32_t sms, Operation& op) {
  Movers& movers = op.movers;
  if (op.shape.num_ranks > kMaxRanks || max_shared_bytes <= kStaticBytes) return false;
  const auto room = static_cast<std::uint32_t>(max_shared_bytes) - kStaticBytes;
  if (kind == Kind::kDispatch) {
    divide_stages(op);
  } else {
    divide_rows(op);
  }
  movers.ctas = sms;
  std::uint32_t stages = room / movers.stage_bytes;
  while (stages > 0 && HeaderLayout(kind, op.shape, stages, sms).bytes + stages * movers.stage_bytes > room)
    --stages;
  if (stages == 0) return false;
  movers.stages = std::clamp(movers.stages, 1u, stages);
  movers.warps = std::min(stages / movers.stages, kMaxWarps - (kind == Kind::kDispatch ? kClerks : 0));
  movers.threads = kMaxThreads;
  movers.header_bytes = HeaderLayout(kind, op.shape, movers.warps * movers.stages, sms).bytes;
  movers.shared_bytes = room / 128 * 128;
  return true;
}

int prepare() {
  int device = 0;
  int bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    for (const bool per_expert : {false, true}) {
      if (error != cudaSuccess) return error;
      error = cudaFuncSetAttribute(kernel_of(kind, per_expert), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   bytes - static_cast<int>(kStaticBytes));
    }
  }
  return error;
}

int launch(Kind kind, const Operation& op, const Operation* on_device, CUstream_st* stream) {
  void* arguments[] = {&on_device};
  return cudaLaunchKernel(kernel_of(kind, op.shape.per_expert), dim3(op.movers.ctas), dim3(op.movers.threads),
                          arguments, op.movers.shared_bytes, stream);
}

}  // namespace epd::kernels::cuda
