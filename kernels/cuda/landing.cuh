// Landings: while few tokens travel, a row lies once at each rank that takes it, in a slot of its source and
// token, before it is spread over experts' rows (dispatch), or after they have been summed (combine).
#pragma once

#include "cuda/placement.cuh"

namespace epd::kernels::cuda {

// What a source tells of a choice. Dispatch: `what` is expert << 16 | number among the source's rows of the
// expert; combine: the row.
struct ToldChoice {
  std::int32_t what;  // -1: none
  float weight;
};
static_assert(sizeof(ToldChoice) == 8);
static_assert(kMaxLandingTokens < 0xffff);
inline constexpr std::uint32_t kNoNumber = 0xffff;  // the token sends this row for a lower k

// Parts of the landing of rank `at`.
__device__ inline std::size_t landing_place(const Operation& op, std::uint32_t source, std::uint32_t token) {
  return std::size_t{source} * op.landing.max_tokens + token;
}
__device__ inline std::uint64_t* counted_line(const Operation& op, std::uint32_t at, std::uint32_t source) {
  return reinterpret_cast<std::uint64_t*>(op.peers[at].landing + op.landing.counted) + source * kSignalWords;
}
__device__ inline std::uint64_t* landed_tag(const Operation& op, std::uint32_t at, std::uint32_t source,
                                            std::uint32_t token, std::uint32_t piece) {
  return reinterpret_cast<std::uint64_t*>(op.peers[at].landing + op.landing.landed) +
         landing_place(op, source, token) * kLandingPieces + piece;
}
__device__ inline std::uint64_t* asked_tag(const Operation& op, std::uint32_t at, std::uint32_t source,
                                           std::uint32_t token) {
  return reinterpret_cast<std::uint64_t*>(op.peers[at].landing + op.landing.asked) +
         landing_place(op, source, token);
}
__device__ inline ToldChoice* told_choices(const Operation& op, std::uint32_t at, std::uint32_t source,
                                           std::uint32_t token) {
  return reinterpret_cast<ToldChoice*>(op.peers[at].landing + op.landing.choices) +
         landing_place(op, source, token) * op.shape.topk;
}
__device__ inline std::uint8_t* landing_slot(const Operation& op, std::uint32_t at, std::uint32_t source,
                                             std::uint32_t token) {
  return op.peers[at].landing + op.landing.slots + landing_place(op, source, token) * op.landing.slot_bytes;
}

__device__ inline ToldChoice read_told(const ToldChoice* at) {
  const uint2 words = __ldcg(reinterpret_cast<const uint2*>(at));
  return {static_cast<std::int32_t>(words.x), __uint_as_float(words.y)};
}
__device__ inline void tell(ToldChoice* at, ToldChoice choice) {
  *reinterpret_cast<uint2*>(at) = {static_cast<std::uint32_t>(choice.what), __float_as_uint(choice.weight)};
}

// Lane s: tokens of source s, as it announced them.
__device__ inline std::uint32_t announced_tokens(const Operation& op) {
  if (lane_of() >= op.shape.num_ranks || !is_there(op, lane_of())) return 0;
  const std::uint64_t* const word = op.peers[op.rank].announcement + lane_of() * kAnnouncementWords + 3;
  return min(static_cast<std::uint32_t>(__ldcg(word)), op.landing.max_tokens);
}

// Each of `warps` warps of each CTA calls when the last that it sent to other ranks has been released: the
// last of all then tells them. `sent`: in shared memory, 0 before.
__device__ inline void tell_others(const Operation& op, Cta cta, std::uint32_t& sent, std::uint32_t warps) {
  bool last = false;
  __syncwarp();
  if (lane_of() == 0) {
    __threadfence_block();
    last = atomicAdd(&sent, 1) == warps - 1;
    __threadfence_block();
    if (last) last = count_up(&workspace(op).sent, cta.count - 1) == cta.count - 1;
  }
  __syncwarp();
  if (!__shfl_sync(kFull, last, 0)) return;
  const std::uint32_t rank = lane_of();
  if (rank >= op.shape.num_ranks || rank == op.rank || !is_there(op, rank)) return;
  store_release_system(op.peers[rank].arrived + op.rank * kSignalWords, op.tag);
}

}  // namespace epd::kernels::cuda
