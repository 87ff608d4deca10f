// How a CTA's shared memory is divided: a header, then the stages of the warps that move rows.
#pragma once

#include "kernels/cuda.h"

#include <cstdint>

namespace epd::kernels::cuda {

// What combine knows of the rows in a stage.
struct StageHeader {
  std::uint32_t num_rows;
  std::uint32_t ends;  // bit p: row p is its rank's last, per-expert layouts
  float weight[32];
};

// Byte offsets of the header's parts.
struct HeaderLayout {
  std::uint32_t barriers;  // [warps*stages]
  std::uint32_t targets;   // [R] pointers of DispatchTarget
  std::uint32_t base;  // compact [CTA,R], else [E]: where the first row for each target lies, of each CTA or
                       // of this one
  std::uint32_t ends;  // [E/R,2] own experts: end of the rows received, end of the block
  std::uint32_t headers;  // [warps*stages] StageHeader, combine
  std::uint32_t scratch;  // dispatch: Counters
  std::uint32_t counting_warps;
  std::uint32_t bytes;

  static constexpr std::uint32_t kCounterBytes = 8192;  // more only if one warp's counters need it

  __host__ __device__ constexpr HeaderLayout(Kind kind, const Shape& shape, std::uint32_t num_stages,
                                             std::uint32_t ctas) {
    const bool dispatch = kind == Kind::kDispatch;
    barriers = 0;
    targets = barriers + num_stages * 8;
    base = targets + (dispatch ? shape.num_ranks * static_cast<std::uint32_t>(sizeof(DispatchTarget)) : 0);
    const std::uint32_t num_targets = shape.per_expert ? shape.num_experts : shape.num_ranks;
    ends = base + (dispatch ? num_targets * (shape.per_expert ? 1 : ctas) * 4 : 0);
    headers = ends + (dispatch ? shape.num_experts / shape.num_ranks * 8 : 0);
    scratch = headers + (dispatch ? 0 : num_stages * static_cast<std::uint32_t>(sizeof(StageHeader)));
    const std::uint32_t wanted = kCounterBytes / 4 / num_targets;
    counting_warps = wanted < 1 ? 1 : wanted > kMaxThreads / 32 ? kMaxThreads / 32 : wanted;
    const std::uint32_t words = shape.num_ranks + shape.num_experts + counting_warps * num_targets;
    bytes = (scratch + (dispatch ? words * 4 : 0) + 127) / 128 * 128;
  }
};

// The parts themselves.
struct Shared {
  std::uint64_t* barriers;
  DispatchTarget* targets;
  std::uint32_t* base;
  std::uint32_t* ends;
  StageHeader* headers;
  std::uint32_t* scratch;
  std::uint32_t counting_warps;
  std::uint8_t* stages;

  __device__ Shared(Kind kind, const Operation& op, std::uint8_t* memory) {
    const HeaderLayout layout(kind, op.shape, op.movers.warps * op.movers.stages, op.movers.ctas);
    barriers = reinterpret_cast<std::uint64_t*>(memory + layout.barriers);
    targets = reinterpret_cast<DispatchTarget*>(memory + layout.targets);
    base = reinterpret_cast<std::uint32_t*>(memory + layout.base);
    ends = reinterpret_cast<std::uint32_t*>(memory + layout.ends);
    headers = reinterpret_cast<StageHeader*>(memory + layout.headers);
    scratch = reinterpret_cast<std::uint32_t*>(memory + layout.scratch);
    counting_warps = layout.counting_warps;
    stages = memory + op.movers.header_bytes;
  }
};

}  // namespace epd::kernels::cuda
