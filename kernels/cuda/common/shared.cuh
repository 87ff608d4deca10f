// The parts of a CTA's shared memory: a header, then the stages of the copy warps.
#pragma once

#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"

namespace epd::kernels::cuda {

// Pointers to the parts (HeaderParts).
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

  __device__ Shared(const Operation& op, std::uint8_t* memory) {
    EPD_AT_MOST(op.division.shared_bytes, dynamic_shared_bytes());
    const HeaderParts& parts = op.division.header;
    barriers = reinterpret_cast<std::uint64_t*>(memory + parts.barriers);
    targets = reinterpret_cast<DispatchTarget*>(memory + parts.targets);
    base = reinterpret_cast<std::uint32_t*>(memory + parts.base);
    ends = reinterpret_cast<std::uint32_t*>(memory + parts.ends);
    headers = reinterpret_cast<StageHeader*>(memory + parts.headers);
    scratch = reinterpret_cast<std::uint32_t*>(memory + parts.scratch);
    bits = reinterpret_cast<std::uint32_t*>(memory + parts.bits);
    counting_warps = parts.counting_warps;
    stages = memory + op.division.header_bytes;
  }
};

}  // namespace epd::kernels::cuda
