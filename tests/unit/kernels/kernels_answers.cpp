#include "kernels_answers.h"

#include "support/left_out_rows.h"

#include <array>

namespace epd::kernels::testing_cases {

using reference::CombineInput;
using reference::CombineOptions;
using reference::RankInput;

namespace {

// Random rows, quicker: pieces of a pool of random values.
class BlockPool {
 public:
  BlockPool(std::mt19937& random, std::uint32_t mood) : random_(random) {
    for (auto& value : values_) value = random_bf16(random, mood);
  }
  std::vector<std::uint16_t> take(std::size_t count) {
    std::vector<std::uint16_t> taken(count);
    for (std::size_t i = 0; i < count; i += 128) {
      const std::size_t piece = std::min<std::size_t>(128, count - i);
      std::copy_n(values_.begin() + between(random_, 0, 4096 - 128), piece,
                  taken.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return taken;
  }

 private:
  std::mt19937& random_;
  std::array<std::uint16_t, 4096> values_{};
};

// The rows that rank d receives, without weights.
reference::RankReceived places_at(const Case& c, std::uint32_t rank) {
  reference::GroupParams params = c.params;
  params.payload = reference::Payload::kOpaque;
  params.opaque_bytes = 8;
  std::vector<RankInput> inputs = c.inputs;
  for (RankInput& input : inputs) input.x.resize(std::size_t{8} * input.num_tokens);
  return reference::dispatch_to(params, inputs, rank);
}

}  // namespace

std::vector<CombineInput> random_answers(const Case& c, std::uint32_t seed, const CombineOptions& options) {
  std::mt19937 random(seed);
  BlockPool pool(random, seed % 6);
  std::vector<CombineInput> answers(c.params.num_ranks);
  const std::uint32_t biases = between(random, 0, 3);  // bit by bit
  for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
    if (!c.is_there(d)) continue;
    CombineInput& answer = answers[d];
    answer.y = pool.take(c.rules.recv_rows * c.params.hidden);
    if (options.weighted) test::spoil_left_out_rows(c.params, c.inputs, places_at(c, d), d, answer.y);
    for (std::size_t i = 0; options.return_weights && i < c.rules.recv_rows * c.choices_per_row(); ++i) {
      answer.y_weights.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    }
    for (std::uint32_t b = 0; b < 2; ++b) {
      if ((biases >> b & 1) == 0) continue;
      answer.bias[b] = pool.take(std::size_t{c.inputs[d].num_tokens} * c.params.hidden);
    }
  }
  return answers;
}

bool has_weights(const Case& c) {
  for (const RankInput& input : c.inputs) {
    if (input.num_tokens != 0 && input.topk_weights.empty()) return false;
  }
  return true;
}

}  // namespace epd::kernels::testing_cases
