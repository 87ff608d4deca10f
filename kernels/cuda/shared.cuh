// The parts of a CTA's shared memory: a header, then the stages of the warps that move rows.
#pragma once

#include "cuda/layout.h"

namespace epd::kernels::cuda {

// The parts themselves.
struct Shared {
  std::uint64_t* barriers;
  DispatchTarget* targets;
  std::uint32_t* base;
  std::uint32_t* ends;
  StageHeader* headers;
  std::uint32_t* scratch;
  std::uint32_t* bits;
  std::uint32_t counting_warps;
  std::uint8_t* stages;

  __device__ Shared(Kind kind, const Operation& op, std::uint8_t* memory) {
    const HeaderLayout layout(kind, op.shape, op.landing.max_tokens, num_barriers(op), op.movers.ctas);
    barriers = reinterpret_cast<std::uint64_t*>(memory + layout.barriers);
    targets = reinterpret_cast<DispatchTarget*>(memory + layout.targets);
    base = reinterpret_cast<std::uint32_t*>(memory + layout.base);
    ends = reinterpret_cast<std::uint32_t*>(memory + layout.ends);
    headers = reinterpret_cast<StageHeader*>(memory + layout.headers);
    scratch = reinterpret_cast<std::uint32_t*>(memory + layout.scratch);
    bits = reinterpret_cast<std::uint32_t*>(memory + layout.bits);
    counting_warps = layout.counting_warps;
    stages = memory + op.movers.header_bytes;
  }
};

}  // namespace epd::kernels::cuda
