// The two things that epbench compares its results with: the ceiling of plain copies, and the reference bit
// for bit.
#include "kernels/numbers.h"
#include "kit/ceiling.h"
#include "kit/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

namespace epd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// ---- ceiling

kernels::reference::GroupParams params_of(std::uint32_t ranks, std::uint32_t experts, std::uint32_t hidden,
                                          std::uint32_t topk, bool fp8) {
  kernels::reference::GroupParams p;
  p.num_ranks = ranks;
  p.num_experts = experts;
  p.hidden = hidden;
  p.topk = topk;
  if (fp8) p.payload = kernels::reference::Payload::kFp8Cast;
  return p;
}

kernels::RoutingPlan plan_of(const std::vector<std::int32_t>& idx, bool per_expert) {
  kernels::RoutingInput input;
  input.topk_idx = idx.data();
  input.per_expert = per_expert;
  input.num_tokens = static_cast<std::uint32_t>(idx.size() / 2);
  input.topk = 2;
  input.num_ranks = 2;
  input.num_experts = 8;
  kernels::RoutingPlan plan;
  EXPECT_FALSE(kernels::build_routing_plan(input, plan).bad);
  return plan;
}

TEST(Ceiling, RowPlacesComeFromTheCountsOfLowerSources) {
  const std::uint32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};  // [source][destination]
  EXPECT_THAT(kit::base_rows({counts, 3, 1}, 0), ElementsAre(0, 0, 0));
  EXPECT_THAT(kit::base_rows({counts, 3, 1}, 2), ElementsAre(5, 7, 9));
  EXPECT_EQ(kit::received_rows({counts, 3, 1}, 1), 15u);
  EXPECT_EQ(kit::rows_between({counts, 3, 1}, 1, 2), 6u);
  EXPECT_EQ(kit::dispatch_row_bytes(params_of(1, 1, 7168, 1, false)), 14336u);
  EXPECT_EQ(kit::dispatch_row_bytes(params_of(1, 1, 7168, 1, true)), 7168u + 4 * 56);
}

TEST(Ceiling, RowsOfExpertsLieOneAfterTheOther) {
  const std::uint32_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8};  // [source][rank][expert]
  EXPECT_THAT(kit::base_rows({counts, 2, 2}, 0), ElementsAre(0, 6, 0, 10));
  EXPECT_THAT(kit::base_rows({counts, 2, 2}, 1), ElementsAre(1, 8, 3, 14));
  EXPECT_EQ(kit::received_rows({counts, 2, 2}, 1), 22u);
  EXPECT_EQ(kit::rows_between({counts, 2, 2}, 1, 0), 11u);
}

TEST(Ceiling, IsTheFasterOfTwoKindsOfCopiesThatTookTurns) {
  const std::vector<double> begins{0, 1, 10, 10, 20, 20};  // two ranks: memcpy, streaming, memcpy
  const std::vector<double> ends{8, 9, 14, 13, 27, 26};
  EXPECT_DOUBLE_EQ(kit::ceiling_time_us(begins, ends, 2), 4);
  EXPECT_DOUBLE_EQ(kit::ceiling_time_us(std::span(begins).first(2), std::span(ends).first(2), 2), 9);
}

TEST(Ceiling, BothKindsCopyEveryRowOfThePlan) {
  for (const kit::CopyKind kind : {kit::CopyKind::kMemcpy, kit::CopyKind::kStreaming}) {
    for (const bool fp8 : {false, true}) {
      auto params = params_of(2, 8, 128, 2, fp8);
      const std::vector<std::int32_t> idx{0, 5, 4, 1, 7, 6};
      kit::CopyCeiling by_rank(params, 3);
      by_rank.warm(0);
      EXPECT_EQ(by_rank.copy_dispatch(0, plan_of(idx, false), {0, 0}, kind),
                5 * kit::dispatch_row_bytes(params));
      EXPECT_EQ(by_rank.copy_combine(0, plan_of(idx, false), {0, 0}, kind), 5 * kit::combine_row_bytes(128));
      params.layout = kernels::reference::Layout::kPacked;
      kit::CopyCeiling by_expert(params, 3);
      by_expert.warm(0);
      const std::vector<std::uint32_t> bases(8, 0);
      EXPECT_EQ(by_expert.copy_dispatch(0, plan_of(idx, true), bases, kind),
                6 * kit::dispatch_row_bytes(params));
      EXPECT_EQ(by_expert.copy_combine(0, plan_of(idx, true), bases, kind), 6 * kit::combine_row_bytes(128));
    }
  }
}

// ---- comparison: it must see every kind of difference

class Comparison : public testing::TestWithParam<bool> {
 protected:
  static constexpr std::uint32_t kTokens = 6;

  Comparison() : params_(params_of(2, 8, 128, 3, GetParam())) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      std::vector<std::uint16_t> x(std::size_t{kTokens} * 128);
      kit::fill_bf16(rank, x.data(), x.size());
      std::vector<std::int32_t> idx;
      for (std::uint32_t i = 0; i < kTokens * 3; ++i)
        idx.push_back(static_cast<std::int32_t>((i * 5 + rank) % 8));
      const std::vector<float> weights(std::size_t{kTokens} * 3, 0.25f);
      inputs_.push_back(kit::make_input(params_, {kTokens, x.data(), idx.data(), weights.data()}));
    }
    expected_ = kernels::reference::dispatch_to(params_, inputs_, 1);
    const std::size_t rows = std::size_t{2} * kTokens;
    recv_x_.resize(rows * 128 * 2);
    scales_.resize(rows);
    idx_.resize(rows * 3);
    weights_.resize(rows * 3);
    src_.resize(rows * 2);
    offsets_.resize(3);
    counts_.resize(4);
    buffers_.recv_x = recv_x_.data();
    buffers_.recv_scales = scales_.data();
    buffers_.recv_topk_idx = idx_.data();
    buffers_.recv_topk_weights = weights_.data();
    buffers_.recv_src = src_.data();
    buffers_.rank_offsets = offsets_.data();
    buffers_.expert_counts = counts_.data();
  }

  // Delivers the rows that a correct engine would have delivered.
  void deliver() {
    std::copy(expected_.recv_x.begin(), expected_.recv_x.end(), recv_x_.begin());
    if (!expected_.recv_scales.empty())
      std::memcpy(scales_.data(), expected_.recv_scales.data(), expected_.recv_scales.size());
    std::copy(expected_.recv_topk_idx.begin(), expected_.recv_topk_idx.end(), idx_.begin());
    std::copy(expected_.recv_topk_weights.begin(), expected_.recv_topk_weights.end(), weights_.begin());
    std::copy(expected_.recv_src.begin(), expected_.recv_src.end(), src_.begin());
    std::copy(expected_.rank_offsets.begin(), expected_.rank_offsets.end(), offsets_.begin());
    std::copy(expected_.expert_counts.begin(), expected_.expert_counts.end(), counts_.begin());
  }
  std::string compare() const {
    return kit::compare_dispatch(params_, expected_, expected_.num_rows, buffers_);
  }

  kernels::reference::GroupParams params_;
  std::vector<kernels::reference::RankInput> inputs_;
  kernels::reference::RankReceived expected_;
  std::vector<std::uint8_t> recv_x_;
  std::vector<float> scales_, weights_;
  std::vector<std::int32_t> idx_, src_, offsets_, counts_;
  epd_buffers_t buffers_{};
};

TEST_P(Comparison, AcceptsTheExpectedBitsAndNamesEachDifference) {
  ASSERT_GT(expected_.num_rows, 0u);
  deliver();
  EXPECT_EQ(compare(), "");
  EXPECT_THAT(kit::compare_dispatch(params_, expected_, expected_.num_rows + 1, buffers_),
              HasSubstr("received rows"));
  recv_x_[1] ^= 1;
  EXPECT_THAT(compare(), HasSubstr("recv_x[0]"));
  deliver();
  weights_[4] = -weights_[4];
  EXPECT_THAT(compare(), HasSubstr("recv_topk_weights[1][1]"));
  deliver();
  ++src_[3];
  EXPECT_THAT(compare(), HasSubstr("recv_src[1][1]"));
  deliver();
  ++counts_[3];
  EXPECT_THAT(compare(), HasSubstr("expert_counts[3]"));
  deliver();
  ++offsets_[2];
  EXPECT_THAT(compare(), HasSubstr("rank_offsets"));
  deliver();
  ++idx_[2];
  EXPECT_THAT(compare(), HasSubstr("recv_topk_idx[0][2]"));
  if (GetParam()) {
    deliver();
    scales_[0] *= 2;
    EXPECT_THAT(compare(), HasSubstr("recv_scales[0]"));
  }
}

TEST_P(Comparison, PoisonIsNeverTakenForAResult) {
  deliver();
  const kernels::RowRange all{0, 2 * kTokens};
  kit::poison_dispatch(params_, {&all, 1}, buffers_);
  EXPECT_NE(compare(), "");
}

INSTANTIATE_TEST_SUITE_P(Payloads, Comparison, testing::Bool(),
                         [](const auto& test) { return test.param ? "fp8" : "bf16"; });

TEST(TestData, Bf16StreamsAreFiniteAndRepeatable) {
  std::vector<std::uint16_t> first(4096), second(4096);
  kit::fill_bf16(11, first.data(), first.size());
  kit::fill_bf16(11, second.data(), second.size());
  EXPECT_EQ(first, second);
  for (const std::uint16_t bits : first) {
    const float magnitude = std::fabs(kernels::bf16_to_float(bits));
    ASSERT_GE(magnitude, 0.0078125f);
    ASSERT_LT(magnitude, 2.0f);
  }
}

}  // namespace
}  // namespace epd
