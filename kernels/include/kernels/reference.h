// The specification of the operations: slow, obvious, one thread, whole groups at a time. The tests compare
// with it.
#pragma once

#include "kernels/rows.h"
#include "proto/operation.h"

#include <cstdint>
#include <vector>

namespace epd::kernels::reference {

using abi::Layout;
using abi::Payload;

// The shape of a group.
struct GroupParams {
  std::uint32_t num_ranks = 1;
  std::uint32_t num_experts = 1;
  std::uint32_t hidden = 128;
  std::uint32_t topk = 1;
  Payload payload = Payload::kBf16;
  ScaleFormat scale_format = ScaleFormat::kFloat32;
  Layout layout = Layout::kCompact;
  std::uint32_t alignment = 1;
  std::uint32_t expert_capacity = 0;  // layout expert: rows of each expert's block
  std::uint32_t opaque_bytes = 0;
  std::uint32_t sum_ranks = 0;  // ranks of a sum domain; 0: all
  abi::ScaleLayout scale_layout = abi::ScaleLayout::kRowMajor;
  abi::RangeFormat range_format = abi::RangeFormat::kRows;
  std::vector<bool> masked;  // [R] or empty: masked ranks; choices of their experts count as -1
};

// The inputs of one rank to dispatch. Indices are int64 here, whatever the group's index type.
struct RankInput {
  std::uint32_t num_tokens = 0;
  std::vector<std::uint8_t> x;         // [n,x_bytes] as the payload says
  std::vector<std::uint8_t> x_scales;  // [n,scale_bytes], Payload::kFp8
  std::vector<std::int64_t> topk_idx;  // [n,K]
  std::vector<float> topk_weights;     // [n,K], or empty: zeros are delivered
};

// The outputs of dispatch at one rank, rows as they lie in recv_x. A row that no token fills has source -1;
// its other fields are undefined. num_rows is M in layout compact, M with padding in packed, and E/R *
// expert_capacity in expert.
struct RankReceived {
  std::uint32_t num_rows = 0;
  std::uint32_t num_recv_rows = 0;           // M as epd reports it
  std::vector<std::uint8_t> recv_x;          // [num_rows,row_bytes]
  std::vector<std::uint8_t> recv_scales;     // [num_rows,scale_bytes], FP8; see scales_by_row()
  std::vector<std::int64_t> recv_topk_idx;   // [num_rows,C]
  std::vector<float> recv_topk_weights;      // [num_rows,C]
  std::vector<std::int32_t> recv_src;        // [num_rows,2]
  std::vector<std::int32_t> rank_offsets;    // [R+1]
  std::vector<std::int32_t> expert_counts;   // [E/R]
  std::vector<std::int32_t> expert_offsets;  // [E/R+1], packed and expert
  std::vector<std::int32_t> source_ranges;   // [E/R,R,2], packed and expert: words as the region has them
};

// Dispatches all ranks: inputs [R], results [R].
std::vector<RankReceived> dispatch(const GroupParams& params, const std::vector<RankInput>& inputs);

// The experts' answers at one rank, and the other inputs of its combine.
struct CombineInput {
  std::vector<std::uint16_t> y;        // [rows,H] bf16, rows as dispatch delivered them
  std::vector<float> y_weights;        // [rows,C], or empty
  std::vector<std::uint16_t> bias[2];  // [n,H] each, or empty
};
struct CombineOptions {
  bool weighted = false;
  abi::ReturnWeights return_weights = abi::kReturnNone;
};
struct RankCombined {
  std::vector<std::uint16_t> out;  // [n,H]
  std::vector<float> out_weights;  // [n,K], if asked for
};

std::vector<RankCombined> combine(const GroupParams& params, const std::vector<RankInput>& inputs,
                                  const std::vector<CombineInput>& answers, const CombineOptions& options);

// The part of one rank in dispatch and in combine, for callers that check only their own.
RankReceived dispatch_to(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank);
RankCombined combine_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                        const std::vector<CombineInput>& answers, const CombineOptions& options,
                        std::uint32_t rank);

// Bytes of a row as given, of a row as delivered, and of its scales as delivered.
std::uint32_t x_bytes(const GroupParams& params);
std::uint32_t row_bytes(const GroupParams& params);
std::uint32_t scale_bytes(const GroupParams& params);

// Words of recv_scales in a group with so many rows of recv_x, and the place of a word of a row there.
std::uint64_t num_scale_words(const GroupParams& params, std::uint64_t recv_rows);
std::uint64_t place_of_scale(const GroupParams& params, std::uint64_t recv_rows, std::uint64_t row,
                             std::uint32_t word);
// The region recv_scales as [recv_rows,scale_bytes], whatever its layout.
std::vector<std::uint8_t> scales_by_row(const GroupParams& params, std::uint64_t recv_rows,
                                        const void* recv_scales);

// Returns the number of selections of one rank's tokens that name experts of masked ranks.
std::uint32_t dropped_selections(const GroupParams& params, const RankInput& input);

}  // namespace epd::kernels::reference
