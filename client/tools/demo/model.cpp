#include "model.h"

#include "kernels/numbers.h"
#include "kit/random.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace epd::demo {
namespace {

constexpr std::uint32_t kScaleBlock = 128;

// Uniform with the given standard deviation, as bf16.
void fill_weights(std::uint64_t seed, float deviation, std::vector<std::uint16_t>& weights) {
  const float factor = deviation * std::sqrt(3.0f) / 32768.0f;
  const std::uint64_t start = kit::mix64(seed);
  for (std::size_t i = 0; i + 4 <= weights.size(); i += 4) {
    const std::uint64_t word = kit::mix64(start + i * 0x9e3779b97f4a7c15ull);
    for (int j = 0; j < 4; ++j) {
      const float value = factor * (static_cast<float>(word >> (16 * j) & 0xffff) - 32767.5f);
      weights[i + static_cast<std::size_t>(j)] = kernels::float_to_bf16(value);
    }
  }
}

std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) table[i] = kernels::e4m3_to_float(static_cast<std::uint8_t>(i));
  return table;
}

void dequantize(const ExpertInput& input, std::uint32_t hidden, std::vector<float>& out) {
  static const std::array<float, 256> kValues = make_e4m3_table();
  out.resize(std::size_t{input.num_rows} * hidden);
  const float* scale = input.scales;
  for (std::size_t row = 0; row < out.size(); row += hidden) {
    for (std::size_t at = 0; at < hidden; at += kScaleBlock, ++scale) {
      const std::size_t end = row + std::min<std::size_t>(at + kScaleBlock, hidden);
      for (std::size_t i = row + at; i < end; ++i) out[i] = kValues[input.rows[i]] * *scale;
    }
  }
}

float silu(float x) {
  return x * kit::sigmoid(x);
}

}  // namespace

Gate::Gate(const ModelShape& shape, std::uint32_t layer)
    : config_(shape.gate),
      hidden_(shape.hidden),
      projection_(std::size_t{shape.gate.num_experts} * shape.hidden),
      bias_(shape.gate.num_experts) {
  const std::uint64_t seed = kit::derive(shape.seed, 0x1000 + layer);
  const float deviation = 1.0f / std::sqrt(static_cast<float>(hidden_));  // logits of variance 1
  kit::Random random(seed);
  for (float& weight : projection_) weight = deviation * random.normal();
  for (float& bias : bias_) bias = 0.02f * random.normal();
}

void Gate::select(const float* x, std::uint32_t num_tokens, std::int32_t* idx, float* weights) const {
  std::vector<float> scores(std::size_t{num_tokens} * config_.num_experts);
  multiply_transposed({num_tokens, config_.num_experts, hidden_}, x, projection_.data(), scores.data());
  for (float& score : scores) score = kit::sigmoid(score);
  for (std::uint32_t t = 0; t < num_tokens; ++t) {
    const std::span<const float> row(scores.data() + std::size_t{t} * config_.num_experts,
                                     config_.num_experts);
    kit::select_experts(config_, row, bias_, idx + std::size_t{t} * config_.topk,
                        weights + std::size_t{t} * config_.topk);
  }
}

Experts::Experts(const ModelShape& shape, std::uint32_t layer, std::uint32_t rank)
    : hidden_(shape.hidden),
      rank_(shape.expert_rank),
      topk_(shape.gate.topk),
      experts_(shape.experts_per_rank()),
      inward_(std::size_t{experts_} * 2 * rank_ * hidden_),
      outward_(std::size_t{experts_} * rank_ * hidden_) {
  const std::uint64_t seed = kit::derive(kit::derive(shape.seed, 0x2000 + layer), rank);
  fill_weights(kit::derive(seed, 0), 1.0f / std::sqrt(static_cast<float>(hidden_)), inward_);
  fill_weights(kit::derive(seed, 1), 1.0f / std::sqrt(static_cast<float>(rank_)), outward_);
}

std::vector<std::vector<Experts::Selection>> Experts::selections_by_expert(const ExpertInput& input) const {
  std::vector<std::vector<Selection>> chosen(experts_);
  for (std::uint32_t row = 0; row < input.num_rows; ++row) {
    for (std::uint32_t k = 0; k < topk_; ++k) {
      const std::size_t at = std::size_t{row} * topk_ + k;
      const std::int32_t expert = input.topk_idx[at];
      if (expert >= 0) chosen[static_cast<std::uint32_t>(expert)].push_back({row, input.topk_weights[at]});
    }
  }
  return chosen;
}

void Experts::run(const ExpertInput& input, std::uint16_t* y) const {
  std::vector<float> rows;
  dequantize(input, hidden_, rows);
  std::vector<float> sums(rows.size());
  const auto chosen = selections_by_expert(input);
  for (std::uint32_t expert = 0; expert < experts_; ++expert) {
    if (!chosen[expert].empty()) run_expert(expert, chosen[expert], rows.data(), sums.data());
  }
  for (std::size_t i = 0; i < sums.size(); ++i) y[i] = kernels::float_to_bf16(sums[i]);
}

// sums[row] += weight * down(silu(gate(row)) * up(row))
void Experts::run_expert(std::uint32_t expert, const std::vector<Selection>& chosen, const float* rows,
                         float* sums) const {
  const std::size_t inward_rows = std::size_t{2} * rank_;
  thread_local std::vector<float> inward;
  thread_local std::vector<float> gathered;
  thread_local std::vector<float> projected;
  inward.resize(inward_rows * hidden_);
  gathered.resize(chosen.size() * hidden_);
  projected.resize(chosen.size() * inward_rows);
  const std::uint16_t* weights = inward_.data() + expert * inward.size();
  for (std::size_t i = 0; i < inward.size(); ++i) inward[i] = kernels::bf16_to_float(weights[i]);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const float* row = rows + std::size_t{chosen[i].row} * hidden_;
    std::copy(row, row + hidden_, gathered.begin() + static_cast<std::ptrdiff_t>(i * hidden_));
  }
  multiply_transposed({chosen.size(), inward_rows, hidden_}, gathered.data(), inward.data(),
                      projected.data());
  const std::uint16_t* outward = outward_.data() + std::size_t{expert} * rank_ * hidden_;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    float* values = projected.data() + i * inward_rows;
    for (std::uint32_t j = 0; j < rank_; ++j) {
      values[j] = chosen[i].weight * silu(values[j]) * values[rank_ + j];
    }
    add_scaled_rows(values, outward, rank_, hidden_, sums + std::size_t{chosen[i].row} * hidden_);
  }
}

}  // namespace epd::demo
