#include "unit/fake_cuda/fake_cuda_world.h"

namespace epd::fake_cuda_test {

World::World(const kernels::Shape& shape, std::uint32_t max_tokens) : shape_(shape) {
  ranks_.resize(shape_.num_ranks);
  for (std::uint32_t r = 0; r < shape_.num_ranks; ++r) make(r, max_tokens);
}

World::~World() {
  for (const Rank& rank : ranks_) {
    cuCtxSetCurrent(rank.context);
    cuStreamDestroy(rank.stream);
    cuDevicePrimaryCtxRelease(rank.device);
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
}

}  // namespace epd::fake_cuda_test
