// combine_rows, on every path of this CPU, against the reference: bit for bit, with outputs poisoned first
// and canaries around them.
#include "kernels/numbers.h"
#include "kernels_answers.h"

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::CombineInput;
using reference::CombineOptions;
using reference::Layout;
using reference::RankCombined;
using reference::RankInput;

void expect_combined(const Case& c, const std::vector<CombineInput>& answers, const CombineOptions& options,
                     std::uint32_t rank, const RankCombined& expected, std::uint32_t lost = 0xffffffff) {
  const RankInput& input = c.inputs[rank];
  std::vector<CombineSource> sources(c.params.num_ranks);
  for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
    if (!c.is_there(d) || d == lost) continue;
    sources[d] = {answers[d].y.data(), options.return_weights ? answers[d].y_weights.data() : nullptr};
  }
  Guarded out(std::size_t{input.num_tokens} * c.params.hidden * 2, c.shift);
  Guarded out_weights(options.return_weights ? input.topk_idx.size() * 4 : 0, c.shift);
  CombineArgs args;
  args.plan = &c.plans[rank];
  args.base = c.placements[rank].base();
  args.sources = sources;
  args.topk_weights = options.weighted ? input.topk_weights.data() : nullptr;
  for (std::size_t b = 0; b < 2; ++b) {
    if (!answers[rank].bias[b].empty()) args.bias[b] = answers[rank].bias[b].data();
  }
  args.out = out.as<std::uint16_t>();
  args.out_weights = options.return_weights ? out_weights.as<float>() : nullptr;
  args.hidden = c.params.hidden;
  args.topk = c.params.topk;
  args.experts_per_rank = c.experts_per_rank();
  args.rank = rank;
  args.sum_ranks = c.params.sum_ranks;
  args.sum_weights = options.return_weights == abi::kReturnSum;
  split(c.threads, input.num_tokens,
        [&](std::uint32_t begin, std::uint32_t end) { host::combine_rows_with(c.choice, args, begin, end); });
  expect_bits("out", out.as<std::uint16_t>(), expected.out);
  expect_bits("out_weights", out_weights.as<float>(), expected.out_weights);
  out.expect_intact("out");
  out_weights.expect_intact("out_weights");
}

class Combine : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(Combine, EqualsReference) {
  for (std::uint32_t seed = 1000; seed < 1500; ++seed) {
    const Case c = random_case(seed, GetParam());
    CombineOptions options;
    options.weighted = has_weights(c);
    options.return_weights = static_cast<abi::ReturnWeights>(seed % 3);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c << (options.weighted ? " weighted" : ""));
    const std::vector<CombineInput> answers = random_answers(c, seed + 1, options);
    for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
      if (!c.is_there(r)) continue;
      SCOPED_TRACE(testing::Message() << "rank " << r);
      expect_combined(c, answers, options, r, reference::combine_to(c.params, c.inputs, answers, options, r));
      if (HasFailure()) return;
    }
  }
}

// Sums of many rows where roundings disagree: large and small terms, ties, results in the subnormals.
TEST_P(Combine, PartialSumsRoundAsTheyCrossTheWire) {
  for (std::uint32_t seed = 2000; seed < 2060; ++seed) {
    Case c = random_case(seed, GetParam());
    c.params.layout = seed % 2 == 0 ? Layout::kPacked : Layout::kExpert;
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
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    const CombineOptions options{seed % 4 < 2, seed % 3 != 0 ? abi::kReturnSum : abi::kReturnOwn};
    const std::vector<CombineInput> answers = random_answers(c, seed % 12, options);
    const std::uint32_t rank = seed % c.params.num_ranks;
    expect_combined(c, answers, options, rank,
                    reference::combine_to(c.params, c.inputs, answers, options, rank));
    if (HasFailure()) return;
  }
}

// A rank that is lost after the dispatch: its experts' contribution is zero.
TEST_P(Combine, ALostRankContributesNothing) {
  for (std::uint32_t seed = 3000; seed < 3060; ++seed) {
    Case c = random_case(seed, GetParam());
    const std::uint32_t lost = seed % c.params.num_ranks;
    c.params.masked.clear();
    c.inputs[lost] = {};  // so that the others' rows lie where they lie without it
    route(c);
    const CombineOptions options{has_weights(c), seed % 2 == 0 ? abi::kReturnSum : abi::kReturnOwn};
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    const std::vector<CombineInput> answers = random_answers(c, seed + 1, options);
    reference::GroupParams without = c.params;
    without.masked.assign(c.params.num_ranks, false);
    without.masked[lost] = true;
    for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
      if (r == lost) continue;
      expect_combined(c, answers, options, r, reference::combine_to(without, c.inputs, answers, options, r),
                      lost);
      if (HasFailure()) return;
    }
  }
}

// A group of four ranks with an expert each; token 0 of every rank chooses all of them, which answer `rows`.
Case all_to_all(const host::RowKernels* kernels, Layout layout) {
  Case c;
  c.params.num_ranks = c.params.num_experts = c.params.topk = 4;
  c.params.layout = layout;
  c.choice = {kernels, host::Stores::kCached};
  for (std::uint32_t r = 0; r < 4; ++r) {
    RankInput input;
    input.num_tokens = 1;
    input.x.resize(std::size_t{2} * c.params.hidden);
    input.topk_idx = {0, 1, 2, 3};
    input.topk_weights = {1, 1, 1, 1};
    c.inputs.push_back(input);
  }
  route(c);
  return c;
}

// Numbers worked out by hand: bf16 has 8 bits, so that 257 is 256 on its way to another domain, and 259 is
// 260 in the end.
TEST_P(Combine, ASumIsRoundedOnItsWayToAnotherDomain) {
  struct Expected {
    std::uint32_t sum_ranks;
    float out[4];  // of the owners
  };
  constexpr float kRows[] = {1, 1, 256, 1};
  constexpr Expected kExpected[] = {
      {0, {260, 260, 260, 260}}, {1, {260, 260, 260, 260}}, {2, {258, 258, 260, 260}},
      {3, {260, 260, 260, 260}}, {4, {260, 260, 260, 260}},
  };
  for (const Layout layout : {Layout::kCompact, Layout::kPacked, Layout::kExpert}) {
    Case c = all_to_all(GetParam(), layout);
    std::vector<CombineInput> answers(4);
    for (std::uint32_t d = 0; d < 4; ++d)
      answers[d].y.assign(c.rules.recv_rows * c.params.hidden, float_to_bf16(kRows[d]));
    for (const Expected& expected : kExpected) {
      c.params.sum_ranks = expected.sum_ranks;
      for (const bool weighted : {false, true}) {
        for (std::uint32_t r = 0; r < 4; ++r) {
          SCOPED_TRACE(testing::Message() << c << " weighted " << weighted << " rank " << r);
          RankCombined out;
          out.out.assign(c.params.hidden, float_to_bf16(expected.out[r]));
          const CombineOptions options{weighted, abi::kReturnNone};
          expect_combined(c, answers, options, r, out);
          expect_bits("reference", reference::combine_to(c.params, c.inputs, answers, options, r).out.data(),
                      out.out);
        }
      }
    }
  }
}

// A row whose weight is 0, of either sign or by weights that cancel, changes nothing, whatever it holds: not
// even the sign of a zero.
TEST_P(Combine, ARowOfWeightZeroIsLeftOut) {
  constexpr std::uint16_t kNan = 0x7fc0;
  constexpr std::uint16_t kInf = 0x7f80;
  struct Summed {
    float weight;     // of rank 0's row
    std::uint16_t y;  // what that row holds
    std::uint16_t compact;
    std::uint16_t by_expert;  // a partial sum of -0 is added to +0
  };
  const std::uint16_t tiny = float_to_bf16(-1e-30f);
  for (const Summed& summed : {Summed{2, float_to_bf16(3), float_to_bf16(6), float_to_bf16(6)},
                               Summed{1e-30f, tiny, 0x8000, 0}, Summed{-0.0f, kNan, 0, 0}}) {
    for (const Layout layout : {Layout::kCompact, Layout::kPacked, Layout::kExpert}) {
      Case c = all_to_all(GetParam(), layout);
      for (RankInput& input : c.inputs) {
        input.topk_idx = {0, 1, 2, 3, 3};
        input.topk_weights = {summed.weight, 0.0f, -0.0f, 1.5f, -1.5f};
      }
      c.params.topk = 5;
      route(c);
      std::vector<CombineInput> answers(4);
      for (std::uint32_t d = 0; d < 4; ++d) {
        const std::uint16_t value = d == 0 ? summed.y : d == 2 ? kInf : kNan;
        answers[d].y.assign(c.rules.recv_rows * c.params.hidden, value);
      }
      RankCombined expected;
      expected.out.assign(c.params.hidden, layout == Layout::kCompact ? summed.compact : summed.by_expert);
      const CombineOptions options{true, abi::kReturnNone};
      for (const std::uint32_t sum_ranks : {0u, 1u, 2u}) {
        c.params.sum_ranks = sum_ranks;
        SCOPED_TRACE(testing::Message() << c << " weight " << summed.weight);
        expect_combined(c, answers, options, 0, expected);
        expect_bits("reference", reference::combine_to(c.params, c.inputs, answers, options, 0).out.data(),
                    expected.out);
      }
    }
  }
}

// One domain has all ranks, whether that is said by 0, by R or by more.
TEST_P(Combine, OneDomainOfAllRanksIsNone) {
  for (std::uint32_t seed = 4000; seed < 4060; ++seed) {
    Case c = random_case(seed, GetParam());
    const CombineOptions options{has_weights(c), seed % 2 == 0 ? abi::kReturnSum : abi::kReturnOwn};
    const std::vector<CombineInput> answers = random_answers(c, seed + 1, options);
    const std::uint32_t rank = seed % c.params.num_ranks;
    if (!c.is_there(rank)) continue;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    c.params.sum_ranks = 0;
    const RankCombined expected = reference::combine_to(c.params, c.inputs, answers, options, rank);
    for (const std::uint32_t sum_ranks : {0u, c.params.num_ranks, c.params.num_ranks + 3}) {
      c.params.sum_ranks = sum_ranks;
      expect_combined(c, answers, options, rank, expected);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Combine, RoundTripReturnsTheSumOfTheRows) {
  for (std::uint32_t seed = 40; seed < 46; ++seed) {
    Case c = random_case(seed, GetParam());
    c.params.payload = reference::Payload::kBf16;
    c.params.layout = static_cast<Layout>(seed % 3);
    c.params.alignment = 4;
    c.params.sum_ranks = 0;  // sums of domains would be rounded
    c.params.masked.clear();
    for (RankInput& input : c.inputs) {
      input.x.clear();
      for (std::size_t i = 0; i < std::size_t{input.num_tokens} * c.params.hidden; ++i) {
        const std::uint16_t bits = float_to_bf16(static_cast<float>(i % 16));  // every sum is exact
        input.x.push_back(static_cast<std::uint8_t>(bits));
        input.x.push_back(static_cast<std::uint8_t>(bits >> 8));
      }
    }
    route(c);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    std::vector<CombineInput> answers(c.params.num_ranks);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      const auto received = reference::dispatch_to(c.params, c.inputs, d);
      answers[d].y.resize(c.rules.recv_rows * c.params.hidden, 0x7fff);  // of unfilled rows: NaN
      for (std::size_t i = 0; i < received.recv_x.size() / 2; ++i) {
        if (received.recv_src[i / c.params.hidden * 2] < 0) continue;
        answers[d].y[i] =
            static_cast<std::uint16_t>(received.recv_x[2 * i] | received.recv_x[2 * i + 1] << 8);
      }
    }
    for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
      RankCombined expected;
      for (std::size_t i = 0; i < std::size_t{c.inputs[r].num_tokens} * c.params.hidden; ++i) {
        const std::size_t token = i / c.params.hidden;
        const std::uint32_t copies = c.plans[r].begin[token + 1] - c.plans[r].begin[token];
        expected.out.push_back(float_to_bf16(static_cast<float>(copies * (i % 16))));
      }
      expect_combined(c, answers, {}, r, expected);
    }
  }
}

// Only the tokens of the range are touched.
TEST_P(Combine, RangesAreExact) {
  const host::Choice choice{GetParam(), host::Stores::kCached};
  constexpr std::uint32_t kTokens = 6;
  constexpr std::uint32_t kHidden = 256;
  const std::vector<std::int32_t> choices(kTokens, 0);
  RoutingPlan plan;
  RoutingInput routing;
  routing.topk_idx = choices.data();
  routing.num_tokens = kTokens;
  routing.topk = routing.num_ranks = routing.num_experts = 1;
  ASSERT_FALSE(build_routing_plan(routing, plan).bad);
  const std::vector<std::uint16_t> y(std::size_t{kTokens} * kHidden, 0x3f80);
  const std::vector<CombineSource> sources = {{y.data(), nullptr}};
  const std::vector<std::int32_t> base = {0};
  std::vector<std::uint16_t> out(y.size(), 0x1234);
  CombineArgs args;
  args.plan = &plan;
  args.base = base;
  args.sources = sources;
  args.out = out.data();
  args.hidden = kHidden;
  args.topk = args.experts_per_rank = 1;
  host::combine_rows_with(choice, args, 2, 4);
  host::combine_rows_with(choice, args, 5, 5);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t token = i / kHidden;
    ASSERT_EQ(out[i], token == 2 || token == 3 ? 0x3f80 : 0x1234) << "token " << token;
  }
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, Combine, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
