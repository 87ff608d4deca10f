// Dispatch through landings: the rows that a CTA sends, and how x comes to it.
#pragma once

#include "cuda/common/shared.cuh"
#include "cuda/low_latency/inbox.cuh"

namespace epd::kernels::cuda {

// Rows of a CTA's tokens, and where they lie before they leave. CTA 0 moves none, if there are others.
//
// Stages of rows that are cast belong to rows, in rounds: a row that leaves, then its x, where later two rows
// land. Of others they belong to warps, and the first round is one row for each.
//
// x of the first round comes by bulk copies, before anything else is done. The last warp asks for them: it
// has nothing else to do then, and so the fence between the proxies that they take costs nobody time. Later
// rounds, which only large operations have, are asked for by warp 0 if they are cast, else by each warp for
// itself.
class OwnRows {
 public:
  __device__ OwnRows(const Operation& op, const Shared& shared) : op_(op), shared_(shared) {}
  // Among those that move rows.
  __device__ Cta cta() const {
    const std::uint32_t metadata_cta = op_.movers.ctas == 1 ? 0 : 1;
    return {blockIdx.x - metadata_cta, op_.movers.ctas - metadata_cta};
  }
  // Found anew each time, as most of what can be: registers are full.
  __device__ std::uint32_t count() const {
    const bool copies = op_.movers.ctas == 1 || blockIdx.x != 0;
    return copies && op_.num_tokens > cta().index ? rows_of(cta().index) : 0;
  }
  __device__ std::uint32_t token_of(std::uint32_t row) const { return cta().index + cta().count * row; }
  __device__ const std::uint8_t* x_of(std::uint32_t row) const {
    EPD_BELOW(token_of(row), op_.num_tokens);
    return static_cast<const std::uint8_t*>(op_.x) + std::size_t{token_of(row)} * op_.shape.format.x_bytes;
  }
  __device__ std::uint8_t* stage(std::uint32_t number) const {
    EPD_AT_MOST(op_.movers.header_bytes + (number + 1) * op_.movers.stage_bytes, op_.movers.shared_bytes);
    return shared_.stages + std::size_t{number} * op_.movers.stage_bytes;
  }
  // Of a round at most, and of the one that begins with row `first`.
  __device__ std::uint32_t most() const {
    return op_.shape.format.cast ? op_.movers.stages : op_.movers.warps;
  }
  __device__ std::uint32_t round_rows(std::uint32_t first) const { return min(most(), count() - first); }
  // A warp, whose lanes have fenced; `there` completes. Nothing is on its way if there are no rows. A barrier
  // of who reads x follows: before sm_90 it is there then.
  __device__ void load_round(std::uint32_t first, std::uint64_t* arrived) const {
    const std::uint32_t rows = round_rows(first);
    const std::uint32_t bytes = op_.shape.format.x_bytes;
    if (rows == 0) return;
    if (lane_of() == 0) barrier_expect(arrived, rows * bytes);
    __syncwarp();
    const bool mine = lane_of() < rows;
    const std::uint32_t place = mine ? lane_of() : 0;
    const std::uint32_t behind = op_.shape.format.cast ? op_.movers.landed_pitch : 0;
#if EPD_BULK
    warp_load(stage(place) + behind, x_of(first + place), bytes, mine, arrived);
#else
    for (std::uint32_t i = 0; i < rows; ++i) lanes_load(stage(i) + behind, x_of(first + i), bytes);
    thread_loads_commit();
    thread_loads_wait<0>(0);
    __syncwarp();
#endif
  }
  // Rows that no other follows in their stage are held: this rank takes them from there, without a landing.
  __device__ std::uint32_t first_local() const {
    return first_local_of(count());
  }
  __device__ bool is_local(std::uint32_t token) const {
    const std::uint32_t row = round_of(token);
    return row >= first_local_of(rows_of(token - row * cta().count));
  }

 private:
  __device__ std::uint32_t round_of(std::uint32_t token) const {
    return cta().count == 1 ? token : token / op_.movers.senders_divisor;
  }
  // That a CTA sends; one at least.
  __device__ std::uint32_t rows_of(std::uint32_t cta) const {
    return round_of(op_.num_tokens - cta - 1) + 1;
  }
  // The first row that is held of a CTA that has so many.
  __device__ std::uint32_t first_local_of(std::uint32_t rows) const {
    if (!op_.shape.format.cast) return rows - min(rows, op_.movers.warps);
    if (rows <= op_.movers.stages) return 0;
    return (rows - 1) / op_.movers.stages_divisor * op_.movers.stages;
  }

  const Operation& op_;
  const Shared& shared_;
};

}  // namespace epd::kernels::cuda
