// The specification: slow, obvious, one thread, whole groups at a time. Every test compares with it.
#pragma once

#include <cstdint>
#include <vector>

namespace epd::kernels::reference {

struct GroupParams {
  std::uint32_t num_ranks = 1;
  std::uint32_t num_experts = 1;
  std::uint32_t hidden = 128;
  std::uint32_t topk = 1;
  bool fp8 = false;
};

// What one rank gives to dispatch. Indices are int64 here whatever travels.
struct RankInput {
  std::uint32_t num_tokens = 0;
  std::vector<std::uint16_t> x;        // [n,H] bf16
  std::vector<std::int64_t> topk_idx;  // [n,K]
  std::vector<float> topk_weights;     // [n,K], or empty: zeros are delivered
};

struct RankReceived {
  std::uint32_t num_rows = 0;               // M
  std::vector<std::uint16_t> recv_bf16;     // [M,H], unless fp8
  std::vector<std::uint8_t> recv_e4m3;      // [M,H], fp8
  std::vector<float> recv_scales;           // [M,H/128], fp8
  std::vector<std::int64_t> recv_topk_idx;  // [M,K]
  std::vector<float> recv_topk_weights;     // [M,K]
  std::vector<std::int32_t> recv_src;       // [M,2]
  std::vector<std::int32_t> rank_offsets;   // [R+1]
  std::vector<std::int32_t> expert_counts;  // [E/R]
};

// inputs [R]; returns [R].
std::vector<RankReceived> dispatch(const GroupParams& params, const std::vector<RankInput>& inputs);

// y[r]: [M_r,H] bf16, rows as dispatch delivered them. Returns out[r]: [n_r,H] bf16.
std::vector<std::vector<std::uint16_t>> combine(const GroupParams& params,
                                                const std::vector<RankInput>& inputs,
                                                const std::vector<std::vector<std::uint16_t>>& y,
                                                bool weighted);

// One rank's share of the two above, for callers that check only themselves.
RankReceived dispatch_to(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank);
std::vector<std::uint16_t> combine_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                                      const std::vector<std::vector<std::uint16_t>>& y, bool weighted,
                                      std::uint32_t rank);

}  // namespace epd::kernels::reference
