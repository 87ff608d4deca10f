// Sums for other nodes: asks, sums of a gateway's node, and merging them with near rows, against the
// reference: bit for bit, with outputs poisoned first and canaries around them.
#include "kernels/numbers.h"
#include "kernels_far_world.h"

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::CombineInput;
using reference::CombineOptions;
using reference::Layout;
using reference::RankCombined;
using reference::RankInput;

void expect_combined(std::uint32_t seed, const World& world, const reference::GroupParams& params) {
  std::mt19937 random(seed);
  for (std::uint32_t r = 0; r < world.far.c.params.num_ranks; ++r) {
    if (!world.far.is_there(r)) continue;
    SCOPED_TRACE(testing::Message() << "rank " << r);
    const RankCombined expected =
        reference::combine_to(params, world.far.c.inputs, world.answers, world.options, r);
    const std::vector<Sums> sums = sums_for(random, world, r);
    if (testing::Test::HasFailure()) return;
    Owner one(world, r);
    ASSERT_NO_FATAL_FAILURE(one.merge_as_they_come(random, sums));
    ASSERT_NO_FATAL_FAILURE(one.expect(expected));
    Owner two(world, r);
    two.merge_at_once(sums, between(random, 5, 24));
    ASSERT_NO_FATAL_FAILURE(two.expect(expected));
  }
}

class FarCombine : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(FarCombine, EqualsReference) {
  for (std::uint32_t seed = 1000; seed < 1400; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    CombineOptions options;
    options.weighted = has_weights(far.c);
    options.return_weights = static_cast<abi::ReturnWeights>(seed % 3);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far
                                    << (options.weighted ? " weighted" : ""));
    const World world(std::move(far), seed + 1, options);
    ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, world.far.c.params));
    if (HasFailure()) return;
  }
}

// A rank that is lost after the dispatch: its experts' contribution is zero.
TEST_P(FarCombine, ALostRankContributesNothing) {
  for (std::uint32_t seed = 3000; seed < 3080; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    far.lost = seed % far.c.params.num_ranks;
    far.c.params.masked.clear();
    far.c.inputs[far.lost] = {};  // so that the others' rows lie where they lie without it
    route(far.c);
    const CombineOptions options{has_weights(far.c), seed % 2 == 0 ? abi::kReturnSum : abi::kReturnOwn};
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    reference::GroupParams without = far.c.params;
    without.masked.assign(far.c.params.num_ranks, false);
    without.masked[far.lost] = true;
    const World world(std::move(far), seed + 1, options);
    ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, without));
    if (HasFailure()) return;
  }
}

// The same shape on one node, on several, and on as many as there are ranks: the same bits. Many rows for
// each token, so that roundings disagree.
TEST_P(FarCombine, PlacesOfRanksAreNoPartOfTheResult) {
  for (std::uint32_t seed = 2000; seed < 2040; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    Case& c = far.c;
    c.params.layout = static_cast<Layout>(seed % 3);
    c.params.alignment = 1;
    c.params.topk = 16;
    c.params.masked.clear();
    std::mt19937 random(seed);
    for (RankInput& input : c.inputs) {
      input.topk_idx.clear();
      input.topk_weights.clear();
      for (std::size_t i = 0; i < std::size_t{input.num_tokens} * 16; ++i) {
        input.topk_idx.push_back(between(random, 0, c.params.num_experts - 1));
        input.topk_weights.push_back(random_weight(random, seed % 3));
      }
    }
    route(c);
    const std::uint32_t ranks = c.params.num_ranks;
    for (std::uint32_t nodes = 1; nodes <= ranks; nodes += ranks > 7 ? 23 : 1) {
      far.num_nodes = nodes;
      far.node_of_rank.clear();
      for (std::uint32_t r = 0; r < ranks; ++r) far.node_of_rank.push_back(r * nodes / ranks);
      SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
      const World world(far, seed % 12, {seed % 4 < 2, seed % 2 == 0 ? abi::kReturnSum : abi::kReturnOwn});
      ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, world.far.c.params));
      if (HasFailure()) return;
    }
  }
}

// One record for a token and a domain that is whole, however many ranks it has; else one for each rank.
TEST(FarSums, CrossOnceForAWholeDomain) {
  FarCase far;
  Case& c = far.c;
  c.params.num_ranks = c.params.num_experts = c.params.topk = 6;
  c.choice = {&host::best_row_kernels(), host::Stores::kCached};
  for (std::uint32_t r = 0; r < 6; ++r) {
    RankInput input;
    input.num_tokens = 5;
    input.x.resize(std::size_t{10} * c.params.hidden);
    for (std::uint32_t i = 0; i < 30; ++i) input.topk_idx.push_back(i % 6);
    c.inputs.push_back(input);
  }
  far.num_nodes = 2;
  far.node_of_rank = {0, 0, 0, 1, 1, 1};
  struct Expected {
    std::uint32_t sum_ranks;
    std::uint32_t records;  // for each token of rank 0, from node 1
  };
  for (const Expected& expected : {Expected{0, 3}, {1, 3}, {2, 2}, {3, 1}, {4, 2}, {5, 3}, {6, 3}}) {
    for (const Layout layout : {Layout::kCompact, Layout::kPacked, Layout::kExpert}) {
      c.params.layout = layout;
      c.params.sum_ranks = expected.sum_ranks;
      route(c);
      SCOPED_TRACE(testing::Message() << far);
      std::mt19937 random(1);
      const World world(far, 3, {});
      EXPECT_EQ(sums_for(random, world, 0)[1].num_records(), 5 * expected.records);
    }
  }
}

// Products that are too small for a float leave the sign of their zero: here, and on their way. With `weight`
// 0 rank 1's rows are NaN, and left out.
void expect_sign_of_zero(const host::RowKernels* kernels, float weight) {
  FarCase far;
  Case& c = far.c;
  c.params.num_ranks = c.params.num_experts = c.params.topk = 2;
  c.params.sum_ranks = 1;
  c.choice = {kernels, host::Stores::kCached};
  for (std::uint32_t r = 0; r < 2; ++r) {
    RankInput input;
    input.num_tokens = 1;
    input.x.resize(std::size_t{2} * c.params.hidden);
    input.topk_idx = {0, 1};
    input.topk_weights = {1e-30f, weight};
    c.inputs.push_back(input);
  }
  route(c);
  far.num_nodes = 2;
  far.node_of_rank = {0, 1};
  World world(far, 1, {true, abi::kReturnNone});
  for (CombineInput& answer : world.answers) {
    answer.bias[0].clear();
    answer.bias[1].clear();
    answer.y.assign(c.rules.recv_rows * c.params.hidden, float_to_bf16(-1e-30f));
  }
  if (weight == 0.0f) std::fill(world.answers[1].y.begin(), world.answers[1].y.end(), 0x7fc0);
  const RankCombined expected = reference::combine_to(c.params, c.inputs, world.answers, world.options, 0);
  EXPECT_EQ(expected.out[0], 0x8000);
  ASSERT_NO_FATAL_FAILURE(expect_combined(1, world, c.params));
}
TEST_P(FarCombine, AZeroKeepsItsSign) {
  expect_sign_of_zero(GetParam(), 1e-30f);
}
TEST_P(FarCombine, ADomainOfWeightZeroIsLeftOut) {
  for (const float weight : {0.0f, -0.0f}) expect_sign_of_zero(GetParam(), weight);
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, FarCombine, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
