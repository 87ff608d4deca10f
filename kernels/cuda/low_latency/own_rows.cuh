// Low-latency dispatch: the rows that a CTA sends, and the loading of their x.
#pragma once

#include "cuda/common/shared.cuh"
#include "cuda/low_latency/inbox.cuh"

namespace epd::kernels::cuda {

// The rows of a CTA's tokens, and their stages. If there are several CTAs, CTA 0 copies no rows.
//
// Rows with a cast go in rounds, and a stage belongs to one row. The stage holds the row to be sent, then its
// x; later the room of x holds two received rows. Without a cast, a stage belongs to a warp, and a round has
// one row for each warp.
//
// Bulk copies load x of the first round before anything else happens. The signal warp issues them: it is idle
// then, so the proxy fence in front of them delays nobody. Only large operations have later rounds. Warp 0
// issues the copies of a later round with a cast; else each warp loads for itself.
class OwnRows {
 public:
  __device__ OwnRows(const Operation& op, const Shared& shared, CtaBoard& board)
      : op_(op), shared_(shared), board_(board) {}
  // The CTA's number among the CTAs that copy rows.
  __device__ Cta cta() const {
    const std::uint32_t metadata_cta = op_.division.ctas == 1 ? 0 : 1;
    return {blockIdx.x - metadata_cta, op_.division.ctas - metadata_cta};
  }
  // Counts the CTA's rows. One warp calls; a barrier must follow before the others use them.
  __device__ void count_rows() const {
    const bool copies = op_.division.ctas == 1 || blockIdx.x != 0;
    const std::uint32_t rows = copies && op_.num_tokens > cta().index ? rows_of(cta().index) : 0;
    if (lane_of() == 0) {
      board_.rows = rows;
      board_.first_local = first_local_of(rows);
    }
    __syncwarp();
  }
  // The number of the CTA's rows. It is not kept in a register, since those are full.
  __device__ std::uint32_t count() const { return board_.rows; }
  __device__ std::uint32_t token_of(std::uint32_t row) const { return cta().index + cta().count * row; }
  __device__ const std::uint8_t* x_of(std::uint32_t row) const {
    EPD_BELOW(token_of(row), op_.num_tokens);
    return static_cast<const std::uint8_t*>(op_.x) + std::size_t{token_of(row)} * op_.shape.format.x_bytes;
  }
  __device__ std::uint8_t* stage(std::uint32_t number) const {
    EPD_AT_MOST(op_.division.header_bytes + (number + 1) * op_.division.stage_bytes,
                op_.division.shared_bytes);
    return shared_.stages + std::size_t{number} * op_.division.stage_bytes;
  }
  // The most rows of a round, and the rows of the round that begins with row `first`.
  __device__ std::uint32_t most() const {
    return op_.shape.format.cast ? op_.division.stages : op_.division.warps;
  }
  __device__ std::uint32_t round_rows(std::uint32_t first) const { return min(most(), count() - first); }
  // Loads x of the round that begins with row `first`; `arrived` completes. Without rows nothing is loaded.
  // One warp calls, whose lanes have passed a proxy fence. A barrier must follow before x is read: before
  // sm_90 the loads are complete then.
  __device__ void load_round(std::uint32_t first, std::uint64_t* arrived) const {
    const std::uint32_t rows = round_rows(first);
    const std::uint32_t bytes = op_.shape.format.x_bytes;
    if (rows == 0) return;
    if (bytes % 16 != 0) {
#pragma unroll 1
      for (std::uint32_t i = 0; i < rows; ++i) lanes_load_eights(stage(i), x_of(first + i), bytes);
      if (lane_of() == 0) barrier_expect(arrived, 0);
      return;
    }
    if (lane_of() == 0) barrier_expect(arrived, rows * bytes);
    __syncwarp();
    const bool mine = lane_of() < rows;
    const std::uint32_t place = mine ? lane_of() : 0;
    const std::uint32_t behind = op_.shape.format.cast ? op_.division.inbox_pitch : 0;
#if EPD_BULK
    warp_load(stage(place) + behind, x_of(first + place), bytes, mine, arrived);
#else
    for (std::uint32_t i = 0; i < rows; ++i) lanes_load(stage(i) + behind, x_of(first + i), bytes);
    thread_loads_commit();
    thread_loads_wait<0>(0);
    __syncwarp();
#endif
  }
  // Rows of the last round are local rows if their token chose this rank: no later row takes their stage, so
  // this rank takes them from there and not from its inbox.
  __device__ std::uint32_t first_local() const {
    return board_.first_local;
  }
  // Returns whether the row of a token of this rank, of any CTA, is in its CTA's last round.
  __device__ bool is_local(std::uint32_t token) const {
    const std::uint32_t row = round_of(token);
    return row >= first_local_of(rows_of(token - row * cta().count));
  }

 private:
  __device__ std::uint32_t round_of(std::uint32_t token) const {
    return cta().count == 1 ? token : token / op_.division.senders_divisor;
  }
  // The number of rows of CTA `cta`, at least one.
  __device__ std::uint32_t rows_of(std::uint32_t cta) const {
    return round_of(op_.num_tokens - cta - 1) + 1;
  }
  // The first row of the last round, of a CTA with `rows` rows.
  __device__ std::uint32_t first_local_of(std::uint32_t rows) const {
    if (!op_.shape.format.cast) return rows - min(rows, op_.division.warps);
    if (rows <= op_.division.stages) return 0;
    return (rows - 1) / op_.division.stages_divisor * op_.division.stages;
  }

  const Operation& op_;
  const Shared& shared_;
  CtaBoard& board_;
};

}  // namespace epd::kernels::cuda
