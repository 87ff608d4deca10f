// Arguments of the operations, as plain views of memory. The host kernels are here; a device's own
// take the same structs.
#pragma once

#include "kernels/routing.h"

#include <cstdint>
#include <span>

namespace epd::kernels {

// Where one destination rank receives, and where this source's rows begin there.
struct DispatchTarget {
  void* recv_x = nullptr;              // [R*T,H] bf16 or e4m3
  float* recv_scales = nullptr;        // [R*T,H/128], FP8 only
  void* recv_topk_idx = nullptr;       // [R*T,K] int32 or int64
  float* recv_topk_weights = nullptr;  // [R*T,K]
  std::int32_t* recv_src = nullptr;    // [R*T,2]
  std::uint32_t base_row = 0;
};

struct DispatchArgs {
  const RoutingPlan* plan = nullptr;
  const std::uint16_t* x = nullptr;         // [n,H] bf16
  const float* topk_weights = nullptr;      // [n,K], or null: zeros are delivered
  std::span<const DispatchTarget> targets;  // [R]
  std::uint32_t source_rank = 0;
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t experts_per_rank = 0;
  bool fp8 = false;      // cast each 1x128 block: scale = amax/448
  bool index64 = false;  // type of recv_topk_idx
};

// Pushes the rows of tokens [begin, end). Ranges may run in parallel. All stores are complete and
// visible to a thread that synchronises with the caller afterwards (non-temporal stores are fenced).
void dispatch_rows(const DispatchArgs& args, std::uint32_t begin, std::uint32_t end);

struct CombineSource {
  const std::uint16_t* y = nullptr;  // [R*T,H] bf16 of one rank
  std::uint32_t base_row = 0;        // where this rank's tokens begin there
};

struct CombineArgs {
  const RoutingPlan* plan = nullptr;       // of the dispatch
  std::span<const CombineSource> sources;  // [R]
  const float* topk_weights = nullptr;     // [n,K], or null: unweighted
  std::uint16_t* out = nullptr;            // [n,H] bf16
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t experts_per_rank = 0;
};

// Pulls and sums the rows of tokens [begin, end) into out: float32 accumulator from +0.0, ranks
// ascending, acc = acc + y or, weighted, acc = fma(W, y, acc) with W = sum of the token's weights on
// that rank in order of k (from +0.0, float32); one rounding to bf16, ties to even.
void combine_rows(const CombineArgs& args, std::uint32_t begin, std::uint32_t end);

}  // namespace epd::kernels
