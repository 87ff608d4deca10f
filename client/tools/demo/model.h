#pragma once

#include "kit/routing.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace epd::demo {

// A text becomes hidden states deterministically, without a trained model, but with the skew of text. Equal
// pieces have equal embeddings and similar pieces similar ones, so common words load the same experts.

// Lower-cased words in pieces of at most five letters (later ones begin with '#'), digits and punctuation
// marks each on their own.
std::vector<std::string> split_into_pieces(std::string_view text);

// out [H]: the embedding of pieces[place], mixed with the two pieces before it and the position.
// Root mean square 1.
void embed(const std::vector<std::string>& pieces, std::size_t place, std::uint32_t hidden, float* out);

// Scales values [H] to root mean square 1.
void rms_normalize(float* values, std::uint32_t hidden);

// A Mixture-of-Experts layer of DeepSeek-V3's shape with made-up weights: the gate in full, experts as SwiGLU
// of low rank, all from a seed. Each rank makes only the experts that live on it.
struct ModelShape {
  std::uint32_t num_ranks = 4;
  std::uint32_t num_layers = 4;
  std::uint32_t hidden = 7168;
  std::uint32_t expert_rank = 16;  // of the low-rank experts; a multiple of 4
  kit::GateConfig gate;
  std::uint64_t seed = 1;

  std::uint32_t experts_per_rank() const { return gate.num_experts / num_ranks; }
};

// Weights of one layer's gate.
class Gate {
 public:
  Gate(const ModelShape& shape, std::uint32_t layer);
  // x [n,H]; writes idx and weights [n,K].
  void select(const float* x, std::uint32_t num_tokens, std::int32_t* idx, float* weights) const;

 private:
  kit::GateConfig config_;
  std::uint32_t hidden_;
  std::vector<float> projection_;  // [E,H]
  std::vector<float> bias_;        // [E] corrects the choice, not the weights
};

// Input of the experts: received rows and the choices that brought them.
struct ExpertInput {
  std::uint32_t num_rows = 0;
  const std::uint8_t* rows = nullptr;      // [M,H] e4m3
  const float* scales = nullptr;           // [M,ceil(H/128)]
  const std::int32_t* topk_idx = nullptr;  // [M,K] local experts, -1 elsewhere
  const float* topk_weights = nullptr;     // [M,K]
};

// One rank's experts of one layer.
class Experts {
 public:
  Experts(const ModelShape& shape, std::uint32_t layer, std::uint32_t rank);
  // y [M,H] bf16: for each row the weighted sum over its local experts, in float32, rounded once.
  void run(const ExpertInput& input, std::uint16_t* y) const;

 private:
  struct Selection {
    std::uint32_t row;
    float weight;
  };
  std::vector<std::vector<Selection>> selections_by_expert(const ExpertInput& input) const;
  void run_expert(std::uint32_t expert, const std::vector<Selection>& chosen, const float* rows,
                  float* sums) const;

  std::uint32_t hidden_;
  std::uint32_t rank_;
  std::uint32_t topk_;
  std::uint32_t experts_;
  std::vector<std::uint16_t> inward_;   // [experts, 2*rank, H] bf16: gate rows, then up rows
  std::vector<std::uint16_t> outward_;  // [experts, rank, H] bf16
};

// The two loops in which the demo's arithmetic spends its time (multiply.cpp).

// out[i*n + j] = sum over k of a[i*k_size + k] * b[j*k_size + k]; float32. k_size: a multiple of 16.
// a: [m,k], b: [n,k], out: [m,n]
struct MultiplyShape {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};
void multiply_transposed(const MultiplyShape& shape, const float* a, const float* b, float* out);

// out[h] += sum over j of factors[j] * rows[j*hidden + h]; rows: [count,hidden] bf16, count a multiple of 4.
void add_scaled_rows(const float* factors, const std::uint16_t* rows, std::size_t count, std::size_t hidden,
                     float* out);

}  // namespace epd::demo
