#include "unit/fake_cuda/fake_cuda_world.h"

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
    cuMemFreeHost(rank.counts.host_words);
    cuDevicePrimaryCtxRelease(rank.device);
  }
  cuLibraryUnload(library_);
}

Operation World::operation(std::uint32_t r, std::uint64_t tag, std::uint32_t what) {
  const Rank& own = ranks_[r];
  Operation op;
  op.shape = shape_;
  op.division.ctas = kCtas;
  op.division.threads = 512;
  op.division.shared_bytes = kShared;
  op.rank = r;
  op.tag = tag;
  op.announcement.tag = tag;
  op.announcement.op = what;
  own.describe(op);
  op.counts.mark = static_cast<std::uint32_t>(tag);
  op.routing.head = own.head;
  op.routing.handle = tag;
  op.routing.epoch = 7;
  op.timeout_ns = 30'000'000'000;
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
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernels_[kernel]), op.division.ctas, 1, 1,
                        op.division.threads, 1, 1, op.division.shared_bytes, own.stream, parameters,
                        nullptr));
  parameter = 0;
}

void World::wait() {
  for (const Rank& rank : ranks_) {
    EPD_CU(cuCtxSetCurrent(rank.context));
    EPD_CU(cuStreamSynchronize(rank.stream));
  }
}

void World::make(std::uint32_t r, std::size_t tokens) {
  Rank& rank = ranks_[r];
  int devices = 0;
  EPD_CU(cuInit(0));
  EPD_CU(cuDeviceGetCount(&devices));
  rank.device = static_cast<CUdevice>(r) % devices;
  rank.context = primary_context(rank.device);
  EPD_CU(cuCtxSetCurrent(rank.context));
  EPD_CU(cuStreamCreate(&rank.stream, CU_STREAM_NON_BLOCKING));
  const gpu_test::RegionSizes sizes{shape_, tokens, 64 + (shape_.num_ranks + shape_.num_experts) * 256 * 4,
                                    0};
  rank.arena = std::make_unique<Arena>(rank.device, sizes.total());
  rank.take_from(*rank.arena, sizes);
  rank.operation = rank.arena->take<Operation>(1);
  const auto pinned = [](std::size_t bytes) {
    void* memory = nullptr;
    EPD_CU(cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    return memory;
  };
  rank.abort = static_cast<std::uint32_t*>(pinned(64));
  rank.counts.host_words = static_cast<std::uint64_t*>(pinned(gpu_test::num_placement_words(shape_) * 8));
}

}  // namespace epd::fake_cuda_test
