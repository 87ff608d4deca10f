#include "kernels/reference.h"

#include "kernels/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace epd::kernels::reference {
namespace {

// Magnitude of an e4m3 code without sign: 0 1/512 2/512 ... 448, ascending with the code. 0x7f is NaN.
double e4m3_magnitude(int code) {
  const int exponent = code / 8;
  const int mantissa = code % 8;
  if (exponent == 0) return std::ldexp(mantissa, -9);
  return std::ldexp(8 + mantissa, exponent - 10);
}

std::array<double, 127> all_e4m3_magnitudes() {
  std::array<double, 127> magnitudes{};
  for (int code = 0; code < 127; ++code) magnitudes[code] = e4m3_magnitude(code);
  return magnitudes;
}

// The nearest code; of two equally near the even one; never beyond 448.
std::uint8_t nearest_e4m3(float value) {
  static const std::array<double, 127> magnitudes = all_e4m3_magnitudes();
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(static_cast<double>(value));
  int code = 126;
  if (magnitude < magnitudes[126]) {
    const auto above = std::upper_bound(magnitudes.begin(), magnitudes.end(), magnitude);
    code = static_cast<int>(above - magnitudes.begin()) - 1;
    const double down = magnitude - magnitudes[code];
    const double up = magnitudes[code + 1] - magnitude;
    if (up < down || (up == down && code % 2 == 1)) ++code;
  }
  return static_cast<std::uint8_t>(std::signbit(value) ? 0x80 | code : code);
}

float cast_block(const std::uint16_t* x, std::uint8_t* q) {
  float amax = 1e-30f;
  for (int i = 0; i < 128; ++i) {
    const float value = bf16_to_float(x[i]);
    if (!std::isnan(value)) amax = std::max(amax, std::fabs(value));
  }
  const float inverse = 448.0f / amax;
  for (int i = 0; i < 128; ++i) {
    const float product = bf16_to_float(x[i]) * inverse;
    q[i] = nearest_e4m3(product);
  }
  return amax / 448.0f;
}

std::uint32_t experts_per_rank(const GroupParams& params) {
  return params.num_experts / params.num_ranks;
}

bool lives_on(const GroupParams& params, std::int64_t expert, std::uint32_t rank) {
  return expert >= 0 && expert / experts_per_rank(params) == rank;
}

bool sends(const GroupParams& params, const RankInput& input, std::uint32_t token, std::uint32_t rank) {
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    if (lives_on(params, input.topk_idx[std::size_t{token} * params.topk + k], rank)) return true;
  }
  return false;
}

void append_row(const GroupParams& params, const RankInput& input, std::uint32_t token,
                RankReceived& received) {
  const std::uint16_t* x = input.x.data() + std::size_t{token} * params.hidden;
  if (!params.fp8) {
    received.recv_bf16.insert(received.recv_bf16.end(), x, x + params.hidden);
    return;
  }
  for (std::uint32_t start = 0; start < params.hidden; start += 128) {
    std::uint8_t q[128];
    received.recv_scales.push_back(cast_block(x + start, q));
    received.recv_e4m3.insert(received.recv_e4m3.end(), q, q + 128);
  }
}

void append_choices(const GroupParams& params, const RankInput& input, std::uint32_t token,
                    std::uint32_t rank, RankReceived& received) {
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    const std::size_t place = std::size_t{token} * params.topk + k;
    const std::int64_t expert = input.topk_idx[place];
    const bool here = lives_on(params, expert, rank);
    received.recv_topk_idx.push_back(here ? expert - std::int64_t{rank} * experts_per_rank(params) : -1);
    received.recv_topk_weights.push_back(here && !input.topk_weights.empty() ? input.topk_weights[place]
                                                                             : 0.0f);
    if (here) ++received.expert_counts[expert % experts_per_rank(params)];
  }
}

// The sum over k of the weights of the choices that live on `rank`.
float weight_on(const GroupParams& params, const RankInput& input, std::uint32_t token, std::uint32_t rank) {
  float weight = 0.0f;
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    const std::size_t place = std::size_t{token} * params.topk + k;
    if (lives_on(params, input.topk_idx[place], rank)) weight = weight + input.topk_weights[place];
  }
  return weight;
}

// For each destination, the row where the first token of `source` goes.
std::vector<std::size_t> first_rows(const GroupParams& params, const std::vector<RankInput>& inputs,
                                    std::uint32_t source) {
  std::vector<std::size_t> rows(params.num_ranks, 0);
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    for (std::uint32_t lower = 0; lower < source; ++lower) {
      for (std::uint32_t token = 0; token < inputs[lower].num_tokens; ++token) {
        if (sends(params, inputs[lower], token, rank)) ++rows[rank];
      }
    }
  }
  return rows;
}

}  // namespace

RankReceived dispatch_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                         std::uint32_t rank) {
  RankReceived received;
  received.expert_counts.assign(experts_per_rank(params), 0);
  for (std::uint32_t source = 0; source < params.num_ranks; ++source) {
    received.rank_offsets.push_back(static_cast<std::int32_t>(received.num_rows));
    for (std::uint32_t token = 0; token < inputs[source].num_tokens; ++token) {
      if (!sends(params, inputs[source], token, rank)) continue;
      append_row(params, inputs[source], token, received);
      append_choices(params, inputs[source], token, rank, received);
      received.recv_src.push_back(static_cast<std::int32_t>(source));
      received.recv_src.push_back(static_cast<std::int32_t>(token));
      ++received.num_rows;
    }
  }
  received.rank_offsets.push_back(static_cast<std::int32_t>(received.num_rows));
  return received;
}

std::vector<std::uint16_t> combine_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                                      const std::vector<std::vector<std::uint16_t>>& y, bool weighted,
                                      std::uint32_t rank) {
  const RankInput& input = inputs[rank];
  std::vector<std::uint16_t> out;
  out.reserve(std::size_t{input.num_tokens} * params.hidden);
  std::vector<std::size_t> next_row = first_rows(params, inputs, rank);
  std::vector<float> sum(params.hidden);
  for (std::uint32_t token = 0; token < input.num_tokens; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (std::uint32_t from = 0; from < params.num_ranks; ++from) {
      if (!sends(params, input, token, from)) continue;
      const float weight = weighted ? weight_on(params, input, token, from) : 1.0f;
      const std::uint16_t* row = y[from].data() + next_row[from]++ * params.hidden;
      for (std::uint32_t h = 0; h < params.hidden; ++h) {
        const float value = bf16_to_float(row[h]);
        sum[h] = weighted ? std::fma(weight, value, sum[h]) : sum[h] + value;
      }
    }
    for (const float value : sum) out.push_back(float_to_bf16(value));
  }
  return out;
}

std::vector<RankReceived> dispatch(const GroupParams& params, const std::vector<RankInput>& inputs) {
  std::vector<RankReceived> received;
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    received.push_back(dispatch_to(params, inputs, rank));
  }
  return received;
}

std::vector<std::vector<std::uint16_t>> combine(const GroupParams& params,
                                                const std::vector<RankInput>& inputs,
                                                const std::vector<std::vector<std::uint16_t>>& y,
                                                bool weighted) {
  std::vector<std::vector<std::uint16_t>> out;
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    out.push_back(combine_to(params, inputs, y, weighted, rank));
  }
  return out;
}

}  // namespace epd::kernels::reference
