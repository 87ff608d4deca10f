// The demo's text and model.
#include "kernels/numbers.h"
#include "kit/random.h"
#include "model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace epd {
namespace {

using testing::ElementsAre;

TEST(Text, SplitsWordsIntoPiecesOfFiveLetters) {
  EXPECT_THAT(demo::split_into_pieces("The supervisor, 42!"),
              ElementsAre("the", "super", "#visor", ",", "4", "2", "!"));
  EXPECT_THAT(demo::split_into_pieces(" \n "), testing::IsEmpty());
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / std::sqrt(aa * bb);
}

std::vector<float> embedding(const std::string& text, std::size_t place) {
  std::vector<float> out(1024);
  demo::embed(demo::split_into_pieces(text), place, 1024, out.data());
  return out;
}

TEST(Text, EmbeddingsRepeatHaveUnitSizeAndDependOnContextAndPosition) {
  const auto first = embedding("the expert answers", 1);
  EXPECT_EQ(first, embedding("the expert answers", 1));
  double squares = 0;
  for (const float value : first) squares += value * value;
  EXPECT_NEAR(squares / 1024, 1.0, 1e-3);
  EXPECT_NE(first, embedding("an expert answers", 1));
  EXPECT_GT(cosine(first, embedding("an expert", 1)), cosine(first, embedding("the token", 1)));
}

TEST(Model, MultipliesEveryShapeOfBlock) {
  kit::Random random(5);
  for (const std::size_t m : {1u, 3u, 4u, 6u}) {
    for (const std::size_t n : {1u, 4u, 5u}) {
      constexpr std::size_t kSize = 48;
      std::vector<float> a(m * kSize), b(n * kSize), out(m * n, -1.0f);
      for (float& value : a) value = random.normal();
      for (float& value : b) value = random.normal();
      demo::multiply_transposed({m, n, kSize}, a.data(), b.data(), out.data());
      for (std::size_t i = 0; i < m * n; ++i) {
        double sum = 0;
        for (std::size_t k = 0; k < kSize; ++k) {
          sum += static_cast<double>(a[i / n * kSize + k]) * b[i % n * kSize + k];
        }
        EXPECT_NEAR(out[i], sum, 1e-4) << m << "x" << n << " at " << i;
      }
    }
  }
}

demo::ModelShape small_model() {
  demo::ModelShape shape;
  shape.num_ranks = 2;
  shape.hidden = 128;
  shape.expert_rank = 4;
  shape.gate = {.num_experts = 16, .topk = 2, .num_groups = 4, .groups_kept = 2, .scale = 2.5f};
  return shape;
}

// One row for one expert at weight 1, the same at weight 2, and a row for nobody here.
TEST(Model, ExpertsWeighTheirRowsAndSkipWhatIsNotTheirs) {
  const demo::Experts experts(small_model(), 0, 1);
  std::vector<std::uint8_t> rows(384);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = kernels::float_to_e4m3(static_cast<float>(i % 128 % 7) - 3.0f);
  }
  const std::vector<float> scales(3, 0.5f);
  const std::vector<std::int32_t> idx{5, -1, -1, 5, -1, -1};
  const std::vector<float> weights{1, 0, 0, 2, 0, 0};
  std::vector<std::uint16_t> y(384, 0x7777);
  experts.run({3, rows.data(), scales.data(), idx.data(), weights.data()}, y.data());
  bool any = false;
  for (std::size_t i = 0; i < 128; ++i) {
    const float once = kernels::bf16_to_float(y[i]);
    any = any || once != 0.0f;
    EXPECT_FLOAT_EQ(kernels::bf16_to_float(y[128 + i]), 2 * once);
    EXPECT_EQ(y[256 + i], 0);
  }
  EXPECT_TRUE(any);
}

TEST(Model, GateRoutesEqualTokensAlikeAndTextUnevenly) {
  const demo::ModelShape shape = [] {
    demo::ModelShape made;
    made.hidden = 256;
    return made;
  }();
  const auto pieces = demo::split_into_pieces(
      "the token goes to the expert, the expert answers, the answer comes back, the layer ends, the next "
      "layer "
      "begins, the rows go to the ranks, the ranks add the rows");
  const auto count = static_cast<std::uint32_t>(pieces.size());
  std::vector<float> x(std::size_t{count} * 256);
  for (std::uint32_t t = 0; t < count; ++t) demo::embed(pieces, t, 256, &x[std::size_t{t} * 256]);
  std::vector<std::int32_t> idx(std::size_t{count} * 8), again(std::size_t{count} * 8);
  std::vector<float> weights(std::size_t{count} * 8);
  const demo::Gate gate(shape, 2);
  gate.select(x.data(), count, idx.data(), weights.data());
  gate.select(x.data(), count, again.data(), weights.data());
  EXPECT_EQ(idx, again);
  std::vector<int> counts(256, 0);
  for (const std::int32_t expert : idx) ++counts[static_cast<std::size_t>(expert)];
  const double mean = static_cast<double>(idx.size()) / 256;
  EXPECT_GT(*std::max_element(counts.begin(), counts.end()), 3 * mean);
}

}  // namespace
}  // namespace epd
