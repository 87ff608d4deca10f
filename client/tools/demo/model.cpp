#include "model.h"

#include "kernels/numbers.h"
#include "kit/random.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

namespace epd::demo {

// ---- text

namespace {

constexpr std::size_t kPieceLetters = 5;
constexpr std::uint64_t kCommonSeed = 0xc0ffee;  // a direction that all pieces share

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// out[i + shift] += weight * pseudo-random value i of the stream, uniform with variance 1.
void add_stream(std::uint64_t seed, float weight, std::uint32_t shift, std::uint32_t hidden, float* out) {
  const float factor = weight * std::sqrt(3.0f) / 32768.0f;
  const std::uint64_t start = kit::mix64(seed);
  for (std::uint32_t i = 0; i < hidden; i += 4) {
    const std::uint64_t word = kit::mix64(start + i * 0x9e3779b97f4a7c15ull);
    float* at = out + (i + shift) % hidden;
    for (int j = 0; j < 4; ++j) {
      at[j] += factor * (static_cast<float>(word >> (16 * j) & 0xffff) - 32767.5f);
    }
  }
}

// The piece itself, its letter triples, and what all pieces have in common.
void add_piece(const std::string& piece, float weight, std::uint32_t shift, std::uint32_t hidden,
               float* out) {
  add_stream(hash_of(piece), weight, shift, hidden, out);
  const std::string framed = "<" + piece + ">";
  const float share = 0.5f * weight / std::sqrt(static_cast<float>(framed.size() - 2));
  for (std::size_t i = 0; i + 3 <= framed.size(); ++i) {
    add_stream(hash_of(std::string_view(framed).substr(i, 3)), share, shift, hidden, out);
  }
  add_stream(kCommonSeed, 0.6f * weight, shift, hidden, out);
}

void add_position(std::size_t place, std::uint32_t hidden, float* out) {
  constexpr float kWeight = 0.15f;
  for (std::uint32_t i = 0; i + 1 < hidden; i += 2) {
    const double rate = std::pow(10000.0, -static_cast<double>(i) / hidden);
    const auto angle = static_cast<float>(std::fmod(static_cast<double>(place) * rate, 6.283185307179586));
    out[i] += kWeight * std::sin(angle);
    out[i + 1] += kWeight * std::cos(angle);
  }
}

}  // namespace

std::vector<std::string> split_into_pieces(std::string_view text) {
  std::vector<std::string> pieces;
  bool inside = false;  // of a word
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isspace(byte) != 0) {
      inside = false;
    } else if (std::isalpha(byte) != 0 || byte >= 0x80) {
      if (!inside) {
        pieces.emplace_back();
      } else if (pieces.back().size() - (pieces.back()[0] == '#' ? 1 : 0) >= kPieceLetters) {
        pieces.emplace_back("#");
      }
      pieces.back() += static_cast<char>(std::tolower(byte));
      inside = true;
    } else {
      pieces.emplace_back(1, c);
      inside = false;
    }
  }
  return pieces;
}

void embed(const std::vector<std::string>& pieces, std::size_t place, std::uint32_t hidden, float* out) {
  std::fill_n(out, hidden, 0.0f);
  add_piece(pieces[place], 1.0f, 0, hidden, out);
  // Earlier pieces are shifted, so that the order counts: "the node" differs from "node the".
  if (place >= 1) add_piece(pieces[place - 1], 0.45f, 4, hidden, out);
  if (place >= 2) add_piece(pieces[place - 2], 0.2f, 8, hidden, out);
  add_position(place, hidden, out);
  rms_normalize(out, hidden);
}

void rms_normalize(float* values, std::uint32_t hidden) {
  double sum = 0;
  for (std::uint32_t i = 0; i < hidden; ++i) sum += static_cast<double>(values[i]) * values[i];
  const auto factor = static_cast<float>(1.0 / std::sqrt(sum / hidden + 1e-6));
  for (std::uint32_t i = 0; i < hidden; ++i) values[i] *= factor;
}

// ---- model

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
