// Rows as they travel through landings: what lies where in a slot, and how they are sent there.
#pragma once

#include "cuda/landing.cuh"
#include "cuda/routing.cuh"

namespace epd::kernels::cuda {

// Where the parts of a landed row lie: row, scales; for each choice a weight, and which row it is.
struct LandedRow {
  std::uint32_t weights;
  std::uint32_t choices;
  std::uint32_t bytes;
  std::uint32_t pitch;  // of rows in a stage

  __device__ LandedRow(const RowFormat& format, std::uint32_t topk) {
    const std::uint32_t words = (topk * 4 + 15) / 16 * 16;
    weights = (format.row_bytes + format.scale_bytes + 15) / 16 * 16;
    choices = weights + words;
    bytes = choices + words;
    pitch = (bytes + 127) / 128 * 128;
  }
};

// A choice as it travels with its row: the expert, and the row's number among those that the expert gets from
// the source. Every number is below kMaxLandingTokens.
struct LandedChoice {
  std::uint32_t word;
  static constexpr std::uint32_t kNone = 0xffff;  // no expert; or as a number: a lower k has the same expert
  static __device__ LandedChoice make(std::uint32_t expert, std::uint32_t number) {
    return {number << 16 | (expert & 0xffff)};
  }
  __device__ std::uint32_t expert() const { return word & 0xffff; }
  __device__ std::uint32_t number() const { return word >> 16; }
};

// Rows of a warp that are on their way to landings, two at most: whoever waits for a row holds up the next.
class SentRows {
 public:
  // To every rank that is chosen, from a stage that has the row and all that comes with it. `held`: but for this
  // rank, which takes it from there.
  __device__ void send(const Operation& op, const LandedRow& landed, std::uint8_t* stage, std::uint32_t token,
                       bool held) {
    if (count_ == 2) release_first<1>();
    LandedChoice choice{kFull};
    if (lane_of() < op.shape.topk)
      choice = reinterpret_cast<const LandedChoice*>(stage + landed.choices)[lane_of()];
    const bool chosen = choice.expert() != LandedChoice::kNone;
    const std::uint32_t rank = chosen ? rank_of_expert(op.shape, choice.expert()) : 0;
    const bool leaves = chosen && !(held && rank == op.rank);
    const std::uint32_t ranks = __reduce_or_sync(kFull, leaves ? 1u << rank : 0u);
    const bool mine = ((ranks >> lane_of()) & 1) != 0;
    const std::uint32_t to = mine ? lane_of() : op.rank;
    warp_store(landing_slot(op, to, op.rank, token), stage, landed.bytes, mine);
    stores_commit();
    std::uint64_t* const tag = mine ? landed_tag(op, to, op.rank, token, 0) : nullptr;
    tag_ = op.tag;
    (count_ == 0 ? first_ : second_) = tag;
    ++count_;
  }
  // kLater: stores of the warp that came after them, in groups.
  template <std::uint32_t kLater = 0>
  __device__ void release() {
    if (count_ == 2) release_first<1 + kLater>();
    if (count_ == 1) release_first<kLater>();
  }

 private:
  template <std::uint32_t kLater>
  __device__ void release_first() {
    stores_wait_done_but<kLater>();
    tell();
    first_ = second_;
  }
  __device__ void tell() {
    __syncwarp();
    if (first_ != nullptr) store_release_system(first_, tag_);
    --count_;
  }

  std::uint32_t count_ = 0;
  std::uint64_t tag_ = 0;
  std::uint64_t* first_ = nullptr;  // the lane's
  std::uint64_t* second_ = nullptr;
};

}  // namespace epd::kernels::cuda
