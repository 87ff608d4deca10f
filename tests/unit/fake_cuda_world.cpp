#include "unit/fake_cuda_world.h"

namespace epd::fake_cuda_test {

World::World(const kernels::cuda::Shape& shape, std::uint32_t max_tokens, std::vector<bool> masked)
    : shape_(shape), masked_(std::move(masked)) {
  ranks_.resize(shape_.num_ranks);
  for (std::uint32_t r = 0; r < shape_.num_ranks; ++r) make(r, max_tokens);
  EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  for (int i = 0; i < 3; ++i) {
    EPD_CU(cuLibraryGetKernel(&kernels_[i], library_, kernels::cuda::kKernelNames[i]));
    for (const Rank& rank : ranks_) {
      EPD_CU(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kShared, kernels_[i],
                                  rank.device));
    }
  }
}

World::~World() {
  for (const Rank& rank : ranks_) {
    cuCtxSetCurrent(rank.context);
    cuStreamDestroy(rank.stream);
    cuMemFreeHost(rank.abort);
    cuMemFreeHost(rank.counts.host_placement);
    cuMemFreeHost(rank.counts.host_ready);
    cuDevicePrimaryCtxRelease(rank.device);
  }
  cuLibraryUnload(library_);
}

Operation World::operation(std::uint32_t r, std::uint64_t tag, std::uint64_t what) {
  const Rank& own = ranks_[r];
  Operation op;
  op.shape = shape_;
  op.movers.ctas = kCtas;
  op.movers.threads = 512;
  op.movers.shared_bytes = kShared;
  op.rank = r;
  op.num_tokens = own.num_tokens;
  op.tag = tag;
  op.announcement[0] = tag;
  op.announcement[1] = what;
  op.routing = own.routing;
  op.routing.handle = tag;
  op.routing.epoch = 7;
  op.counts = own.counts;
  op.topk_idx = own.topk_idx;
  op.x = own.x;
  op.out = own.out;
  op.workspace = own.workspace;
  op.workspace_bytes = 64 + (shape_.num_ranks + shape_.num_experts) * 256 * 4;
  op.abort = own.abort;
  op.timeout_ns = 30'000'000'000;
  op.result = own.result;
  for (std::uint32_t i = 0; i < size(); ++i) {
    if (!masked(i)) op.peers[i] = ranks_[i].peer;
  }
  return op;
}

void World::start(Kind kind, const Operation& op) {
  Rank& own = ranks_[op.rank];
  EPD_CU(cuCtxSetCurrent(own.context));
  const auto place = reinterpret_cast<CUdeviceptr>(own.operation);
  EPD_CU(cuMemcpyHtoDAsync(place, &op, sizeof(op), own.stream));
  CUdeviceptr parameter = place;
  void* parameters[] = {&parameter};
  const int kernel = kind == Kind::kDispatch ? 0 : op.shape.per_expert ? 2 : 1;
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernels_[kernel]), op.movers.ctas, 1, 1,
                        op.movers.threads, 1, 1, op.movers.shared_bytes, own.stream, parameters, nullptr));
  parameter = 0;
}

void World::wait() {
  for (const Rank& rank : ranks_) {
    EPD_CU(cuCtxSetCurrent(rank.context));
    EPD_CU(cuStreamSynchronize(rank.stream));
  }
}

std::size_t World::num_placement_words() const {
  const std::size_t ranks = shape_.num_ranks;
  const std::size_t experts = shape_.num_experts / ranks;
  if (!shape_.per_expert) return ranks + ranks + 1 + experts;
  return shape_.num_experts + ranks + 1 + experts + experts + 1 + experts * ranks * 2;
}

void World::make(std::uint32_t r, std::size_t tokens) {
  Rank& rank = ranks_[r];
  const kernels::RowFormat& f = shape_.format;
  const std::size_t rows = shape_.recv_rows;
  const std::size_t index_bytes = shape_.index64 ? 8 : 4;
  const std::size_t experts = shape_.num_experts / shape_.num_ranks;
  const std::size_t words = num_placement_words();
  const std::size_t workspace = 64 + (shape_.num_ranks + shape_.num_experts) * 256 * 4;
  const std::size_t row = f.row_bytes + f.scale_bytes + choices() * (index_bytes + 8) + 8 + shape_.hidden * 2;
  const std::size_t token = f.x_bytes + f.scale_bytes + shape_.topk * (index_bytes + 16) + shape_.hidden * 6;
  int devices = 0;
  EPD_CU(cuInit(0));
  EPD_CU(cuDeviceGetCount(&devices));
  rank.device = static_cast<CUdevice>(r) % devices;
  rank.context = primary_context(rank.device);
  EPD_CU(cuCtxSetCurrent(rank.context));
  EPD_CU(cuStreamCreate(&rank.stream, CU_STREAM_NON_BLOCKING));
  rank.arena = std::make_unique<Arena>(
      rank.device, rows * row + tokens * token + words * 16 + workspace + (256 << 10) +
                       shape_.num_ranks * (shape_.num_ranks + shape_.num_experts + 64) * 4);
  Arena& m = *rank.arena;
  rank.peer.ready = m.take<std::uint64_t>(shape_.num_ranks * 8);
  rank.peer.arrived = m.take<std::uint64_t>(shape_.num_ranks * 8);
  rank.peer.announcement = m.take<std::uint64_t>(shape_.num_ranks * 4);
  rank.peer.rank_counts = m.take<std::uint32_t>(shape_.num_ranks * shape_.num_ranks);
  rank.peer.expert_counts = m.take<std::uint32_t>(shape_.num_ranks * shape_.num_experts);
  rank.peer.target = {m.take<std::uint8_t>(rows * f.row_bytes), m.take<std::uint8_t>(rows * f.scale_bytes),
                      m.take<std::uint8_t>(rows * choices() * index_bytes), m.take<float>(rows * choices()),
                      m.take<std::int32_t>(rows * 2)};
  rank.y = m.take<std::uint16_t>(rows * shape_.hidden);
  rank.y_weights = m.take<float>(rows * choices());
  rank.peer.source = {rank.y, rank.y_weights};
  rank.x = m.take<std::uint8_t>(tokens * f.x_bytes);
  rank.x_scales = m.take<std::uint8_t>(tokens * f.scale_bytes);
  rank.topk_idx = m.take<std::uint8_t>(tokens * shape_.topk * index_bytes);
  rank.topk_weights = m.take<float>(tokens * shape_.topk);
  for (auto& bias : rank.bias) bias = m.take<std::uint16_t>(tokens * shape_.hidden);
  rank.out = m.take<std::uint16_t>(tokens * shape_.hidden);
  rank.out_weights = m.take<float>(tokens * shape_.topk);
  rank.routing.topk = m.take<std::int32_t>(tokens * shape_.topk);
  rank.routing.rows = m.take<std::int32_t>(tokens * shape_.topk);
  rank.routing.placement = m.take<std::int32_t>(words);
  rank.routing.head = m.take<kernels::cuda::RouteHead>(1);
  rank.counts.rank_offsets = m.take<std::int32_t>(shape_.num_ranks + 1);
  rank.counts.expert_counts = m.take<std::int32_t>(experts);
  rank.counts.expert_offsets = m.take<std::int32_t>(experts + 1);
  rank.counts.source_ranges = m.take<std::int32_t>(experts * shape_.num_ranks * 2);
  rank.workspace = m.take<std::uint8_t>(workspace);
  rank.result = m.take<OpResult>(1);
  rank.operation = m.take<Operation>(1);
  const auto pinned = [](std::size_t bytes) {
    void* memory = nullptr;
    EPD_CU(cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    return memory;
  };
  rank.abort = static_cast<std::uint32_t*>(pinned(64));
  rank.counts.host_placement = static_cast<std::int32_t*>(pinned(words * 4));
  rank.counts.host_ready = static_cast<std::uint64_t*>(pinned(64));
}

}  // namespace epd::fake_cuda_test
