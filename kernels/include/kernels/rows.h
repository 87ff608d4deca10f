// Arguments of the operations, as plain views of memory, and the host kernels. Device kernels take the same
// structs.
#pragma once

#include "kernels/routing.h"
#include "proto/shape.h"

#include <cstdint>
#include <span>

namespace epd::kernels {

using abi::ScaleFormat;

// The format of a row, as given and as delivered.
struct RowFormat {
  bool cast = false;  // bf16 in; e4m3 and scales out, in blocks of 1x128 (the last may be shorter)
  ScaleFormat scales = ScaleFormat::kFloat32;  // of the cast
  std::uint32_t hidden = 0;                    // elements; of a row that is only copied: unused
  std::uint32_t x_bytes = 0;                   // of a row as given; a multiple of 8
  std::uint32_t row_bytes = 0;                 // as delivered; a multiple of 8
  std::uint32_t scale_bytes = 0;  // as delivered (and as given, if they are given); a multiple of 4
  // Column-major scales (abi::ScaleLayout): words from one scale of a received row to its next, and rows of a
  // matrix. scale_pitch 0: row-major.
  std::uint32_t scale_pitch = 0;
  std::uint32_t scale_block_rows = 0;

  constexpr bool takes_scales() const { return scale_bytes != 0 && !cast; }
  // Where the first of a received row's scale_bytes / 4 words lies in recv_scales, in words. The next ones
  // follow at scale_pitch, or at once.
  constexpr std::uint64_t scale_word(std::uint64_t row) const {
    const std::uint32_t words = scale_bytes / 4;
    if (scale_pitch == 0) return row * words;
    const std::uint64_t block = row / scale_block_rows;
    return block * words * scale_pitch + (row - block * scale_block_rows);
  }
  // Bytes of recv_scales for so many rows.
  constexpr std::uint64_t scales_bytes(std::uint64_t rows) const {
    if (scale_pitch == 0) return rows * scale_bytes;
    return rows / scale_block_rows * scale_pitch * scale_bytes;
  }
};
// Sets the layout of the scales of a group's received rows.
constexpr void set_scale_layout(RowFormat& format, const abi::GroupShape& shape) {
  if (!shape.scale_columns()) return;
  format.scale_pitch = static_cast<std::uint32_t>(shape.scale_pitch());
  format.scale_block_rows = static_cast<std::uint32_t>(shape.scale_block_rows());
}

// Where a destination rank receives. An inactive rank has recv_x null and receives nothing.
struct DispatchTarget {
  void* recv_x = nullptr;              // [rows,row_bytes]
  void* recv_scales = nullptr;         // [rows,scale_bytes], or in columns; if scale_bytes != 0
  void* recv_topk_idx = nullptr;       // [rows,C] int32 or int64; C = K (compact) or 1
  float* recv_topk_weights = nullptr;  // [rows,C]
  std::int32_t* recv_src = nullptr;    // [rows,2]
};

struct DispatchArgs {
  const RoutingPlan* plan = nullptr;
  std::span<const std::int32_t> base;       // Placement::base
  const void* x = nullptr;                  // [n,x_bytes]
  const void* x_scales = nullptr;           // [n,scale_bytes], if rows come with scales
  const float* topk_weights = nullptr;      // [n,K], or null: zeros are delivered
  std::span<const DispatchTarget> targets;  // [R]
  RowFormat format;
  std::uint32_t source_rank = 0;
  std::uint32_t topk = 0;
  std::uint32_t experts_per_rank = 0;
  bool index64 = false;  // type of recv_topk_idx
};

// Writes the rows of tokens [begin, end) to their places. Ranges may run in parallel. All stores are fenced:
// a thread that synchronises with the caller afterwards sees them.
void dispatch_rows(const DispatchArgs& args, std::uint32_t begin, std::uint32_t end);

// Rows of the rank itself that no token fills. They get recv_topk_idx -1, weight 0 and recv_src -1. With
// `zero` the row and its scales are zeroed.
struct FillArgs {
  DispatchTarget target;
  std::span<const RowRange> ranges;
  RowFormat format;
  std::uint32_t choices_per_row = 1;
  bool index64 = false;
  bool zero = false;
};

// Fills rows [begin, end) of the ranges, which are numbered one range after the other.
void fill_rows(const FillArgs& args, std::uint32_t begin, std::uint32_t end);

// The rows of one rank. An inactive rank has y null and contributes nothing.
struct CombineSource {
  const std::uint16_t* y = nullptr;  // [rows,H] bf16 of one rank
  const float* y_weights = nullptr;  // [rows,C], if out_weights is asked for
};

struct CombineArgs {
  const RoutingPlan* plan = nullptr;       // of the dispatch
  std::span<const std::int32_t> base;      // of the dispatch
  std::span<const CombineSource> sources;  // [R]
  const float* topk_weights = nullptr;     // [n,K], or null: unweighted
  const std::uint16_t* bias[2] = {};       // [n,H] bf16, or null
  std::uint16_t* out = nullptr;            // [n,H] bf16
  float* out_weights = nullptr;            // [n,K], or null: not asked for
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t experts_per_rank = 0;
  std::uint32_t rank = 0;       // the owner: whose tokens these are
  std::uint32_t sum_ranks = 0;  // ranks of a sum domain; 0, R or more: one domain has all
  bool sum_weights = false;     // out_weights are those of kReturnSum
};

// Pulls and sums the rows of tokens [begin, end) into out. The sum of a token, in float32:
//   acc = +0.0; then acc = acc + bias[0], acc = acc + bias[1] where given;
//   then for each sum domain (ranks d * sum_ranks .. (d + 1) * sum_ranks - 1), ascending:
//     the owner's: for each rank, ascending, that holds rows of the token: acc = acc + P, or compact and
//     weighted acc = fma(W, y, acc) with W = sum of the token's weights on that rank in order of k (from
//     +0.0);
//     another one, if its ranks hold rows of the token: q = +0.0; the same, into q; q rounded to bf16;
//     acc = acc + q;
//   one rounding to bf16, ties to even. Rows of weight 0 are left out, whatever they hold.
// P, compact: the rank's row. Packed, expert: the rank's partial sum as it crosses the wire: p = +0.0;
// for the token's rows there in plan order p = p + y, or weighted p = fma(w, y, p) with w = sum of the
// token's weights of that expert in order of k; p rounded to bf16. out_weights[t,k] = y_weights of the row
// that carried the choice (compact: its k-th), +0.0 if there is none. With sum_weights, compact: the sum over
// all rows of the token of their k-th, in float32, by ranks and domains like rows, but never rounded.
void combine_rows(const CombineArgs& args, std::uint32_t begin, std::uint32_t end);

}  // namespace epd::kernels
