// dispatch_rows and combine_rows, on every path of this CPU, against the reference: bit for bit, with outputs
// poisoned first and canaries around them.
#include "kernels/operations.h"

#include "host/row_kernels.h"
#include "kernels/numbers.h"
#include "kernels/reference.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

namespace epd::kernels {
namespace {

using reference::GroupParams;
using reference::RankInput;
using reference::RankReceived;

std::uint32_t between(std::mt19937& random, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
}

// Bytes at a chosen distance from a 64-byte boundary, poisoned, between canaries.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::size_t shift)
      : bytes_(bytes), storage_(bytes + shift + 3 * kGuard, kPoison) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    start_ = kGuard + (64 - address % 64) % 64 + shift;
  }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(storage_.data() + start_);
  }
  void expect_intact(const char* what) const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if (i - start_ < bytes_) continue;
      ASSERT_EQ(storage_[i], kPoison)
          << what << ": stored outside, byte " << static_cast<std::ptrdiff_t>(i - start_);
    }
  }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr std::uint8_t kPoison = 0xcd;
  std::size_t bytes_;
  std::vector<std::uint8_t> storage_;
  std::size_t start_ = 0;
};

// Shapes, values and the way to run, all from one seed.
struct Case {
  GroupParams params;
  std::vector<RankInput> inputs;
  std::vector<RoutingPlan> plans;                 // [R]
  std::vector<std::vector<std::uint32_t>> bases;  // [source][destination]
  bool index64 = false;
  std::size_t shift = 0;  // of outputs from alignment, bytes
  std::uint32_t threads = 1;
  host::Choice choice{};
};

std::uint16_t random_bf16(std::mt19937& random, std::uint32_t mood) {
  switch (mood) {
    case 0: return static_cast<std::uint16_t>(random());            // any bits
    case 1: return static_cast<std::uint16_t>(random() & 0x80ffu);  // subnormal or nearly
    default: {
      const float value = static_cast<float>(static_cast<std::int32_t>(random())) * 1e-9f;
      if (random() % 500 == 0) return static_cast<std::uint16_t>(0x7f80 | (random() & 0x8041u));
      return float_to_bf16(value);
    }
  }
}

float random_weight(std::mt19937& random, std::uint32_t mood) {
  if (mood == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  return static_cast<float>(random() % 100000) * 1.1e-5f;
}

RankInput random_input(std::mt19937& random, const GroupParams& params, std::uint32_t tokens) {
  RankInput input;
  input.num_tokens = tokens;
  const std::uint32_t mood = between(random, 0, 5);
  for (std::size_t i = 0; i < std::size_t{tokens} * params.hidden; ++i)
    input.x.push_back(random_bf16(random, mood));
  const std::uint32_t span = between(random, 0, 3) == 0 ? 1 : params.num_experts;  // everybody to one rank
  const std::uint32_t none_in = between(random, 1, 8);
  for (std::size_t i = 0; i < std::size_t{tokens} * params.topk; ++i) {
    input.topk_idx.push_back(between(random, 0, none_in) == 0 ? -1
                                                              : std::int64_t{between(random, 0, span - 1)});
  }
  if (between(random, 0, 3) != 0) {
    for (std::size_t i = 0; i < input.topk_idx.size(); ++i)
      input.topk_weights.push_back(random_weight(random, mood));
  }
  return input;
}

void build_plans(Case& c) {
  const std::uint32_t ranks = c.params.num_ranks;
  c.plans.resize(ranks);
  c.bases.assign(ranks, std::vector<std::uint32_t>(ranks, 0));
  for (std::uint32_t r = 0; r < ranks; ++r) {
    const RoutingInput input{c.inputs[r].topk_idx.data(), true, c.inputs[r].num_tokens, c.params.topk, ranks,
                             c.params.num_experts};
    ASSERT_FALSE(build_routing_plan(input, c.plans[r]).bad);
    for (std::uint32_t d = 0; r > 0 && d < ranks; ++d) {
      c.bases[r][d] = c.bases[r - 1][d] + c.plans[r - 1].rank_counts[d];
    }
  }
}

Case random_case(std::uint32_t seed, const host::RowKernels* kernels) {
  std::mt19937 random(seed);
  Case c;
  c.params.num_ranks = between(random, 1, 7);
  if (seed % 50 == 7) c.params.num_ranks = 70;
  c.params.num_experts = c.params.num_ranks * between(random, 1, 9);
  c.params.hidden = 128 * between(random, 1, 9);
  c.params.topk = between(random, 0, 3) == 0 ? between(random, 1, 32) : between(random, 1, 8);
  c.params.fp8 = between(random, 0, 1) == 0;
  c.index64 = between(random, 0, 1) == 0;
  c.shift = between(random, 0, 1) == 0 ? 0 : 8 * between(random, 1, 7);
  c.threads = between(random, 0, 3) == 0 ? between(random, 2, 4) : 1;
  c.choice = {kernels, between(random, 0, 1) == 0 ? host::Stores::kCached : host::Stores::kStreaming};
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    const std::uint32_t tokens = between(random, 0, 4) == 0 ? 0 : between(random, 1, 24);
    c.inputs.push_back(random_input(random, c.params, tokens));
  }
  build_plans(c);
  return c;
}

// Runs work(begin, end) over [0, tokens) in as many threads as the case says.
template <typename Work>
void split(std::uint32_t threads, std::uint32_t tokens, Work work) {
  if (threads == 1) return work(0u, tokens);
  std::vector<std::thread> running;
  for (std::uint32_t i = 0; i < threads; ++i) {
    running.emplace_back([=] { work(tokens * i / threads, tokens * (i + 1) / threads); });
  }
  for (std::thread& thread : running) thread.join();
}

// What one destination receives, exactly as large as it must be.
struct Received {
  Received(const Case& c, std::size_t rows)
      : x(rows * c.params.hidden * (c.params.fp8 ? 1 : 2), c.shift),
        scales(c.params.fp8 ? rows * (c.params.hidden / 128) * 4 : 0, c.shift),
        topk_idx(rows * c.params.topk * (c.index64 ? 8 : 4), c.shift),
        topk_weights(rows * c.params.topk * 4, c.shift),
        src(rows * 8, c.shift) {}
  void expect_intact() const {
    x.expect_intact("recv_x");
    scales.expect_intact("recv_scales");
    topk_idx.expect_intact("recv_topk_idx");
    topk_weights.expect_intact("recv_topk_weights");
    src.expect_intact("recv_src");
  }
  Guarded x, scales, topk_idx, topk_weights, src;
};

void run_dispatch(const Case& c, std::vector<Received>& received) {
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    std::vector<DispatchTarget> targets;
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      Received& to = received[d];
      targets.push_back({to.x.as<void>(), to.scales.as<float>(), to.topk_idx.as<void>(),
                         to.topk_weights.as<float>(), to.src.as<std::int32_t>(), c.bases[r][d]});
    }
    const RankInput& input = c.inputs[r];
    const DispatchArgs args{&c.plans[r],
                            input.x.data(),
                            input.topk_weights.empty() ? nullptr : input.topk_weights.data(),
                            targets,
                            r,
                            c.params.hidden,
                            c.params.topk,
                            c.params.num_experts / c.params.num_ranks,
                            c.params.fp8,
                            c.index64};
    split(c.threads, input.num_tokens, [&](std::uint32_t begin, std::uint32_t end) {
      host::dispatch_rows_with(c.choice, args, begin, end);
    });
  }
}

// -0.0 differs from 0.0 and a NaN equals itself.
template <typename T>
auto bits_of(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<std::uint32_t>(value);
  } else {
    return value;
  }
}

template <typename T>
void expect_bits(const char* what, const T* actual, const std::vector<T>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(bits_of(actual[i]), bits_of(expected[i]))
        << what << "[" << i << "] is " << +actual[i] << ", the reference says " << +expected[i];
  }
}

void expect_received(const Case& c, Received& actual, const RankReceived& expected) {
  if (c.params.fp8) {
    expect_bits("recv_x", actual.x.as<std::uint8_t>(), expected.recv_e4m3);
    expect_bits("recv_scales", actual.scales.as<float>(), expected.recv_scales);
  } else {
    expect_bits("recv_x", actual.x.as<std::uint16_t>(), expected.recv_bf16);
  }
  if (c.index64) {
    expect_bits("recv_topk_idx", actual.topk_idx.as<std::int64_t>(), expected.recv_topk_idx);
  } else {
    const std::vector<std::int32_t> narrow(expected.recv_topk_idx.begin(), expected.recv_topk_idx.end());
    expect_bits("recv_topk_idx", actual.topk_idx.as<std::int32_t>(), narrow);
  }
  expect_bits("recv_topk_weights", actual.topk_weights.as<float>(), expected.recv_topk_weights);
  expect_bits("recv_src", actual.src.as<std::int32_t>(), expected.recv_src);
  actual.expect_intact();
}

class Operations : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(Operations, DispatchEqualsReference) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const Case c = random_case(seed, GetParam());
    const std::vector<RankReceived> expected = reference::dispatch(c.params, c.inputs);
    std::vector<Received> received;
    received.reserve(expected.size());
    for (const RankReceived& rank : expected) received.emplace_back(c, rank.num_rows);
    run_dispatch(c, received);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      SCOPED_TRACE(testing::Message() << "destination " << d);
      expect_received(c, received[d], expected[d]);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Operations, CombineEqualsReference) {
  for (std::uint32_t seed = 1000; seed < 1300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const Case c = random_case(seed, GetParam());
    std::mt19937 random(seed + 1);
    std::vector<std::vector<std::uint16_t>> y(c.params.num_ranks);
    std::vector<std::uint32_t> rows(c.params.num_ranks, 0);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      for (const RoutingPlan& plan : c.plans) rows[d] += plan.rank_counts[d];
      for (std::size_t i = 0; i < std::size_t{rows[d]} * c.params.hidden; ++i) {
        y[d].push_back(random_bf16(random, seed % 6));
      }
    }
    for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
      SCOPED_TRACE(testing::Message() << "rank " << r);
      const RankInput& input = c.inputs[r];
      const bool weighted = !input.topk_weights.empty();
      std::vector<CombineSource> sources;
      for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) sources.push_back({y[d].data(), c.bases[r][d]});
      Guarded out(std::size_t{input.num_tokens} * c.params.hidden * 2, c.shift);
      const CombineArgs args{&c.plans[r],
                             sources,
                             weighted ? input.topk_weights.data() : nullptr,
                             out.as<std::uint16_t>(),
                             c.params.hidden,
                             c.params.topk,
                             c.params.num_experts / c.params.num_ranks};
      split(c.threads, input.num_tokens, [&](std::uint32_t begin, std::uint32_t end) {
        host::combine_rows_with(c.choice, args, begin, end);
      });
      expect_bits("out", out.as<std::uint16_t>(), reference::combine_to(c.params, c.inputs, y, weighted, r));
      out.expect_intact("out");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Operations, RoundTripReturnsTheSumOfTheRows) {
  Case c = random_case(42, GetParam());
  c.params.fp8 = false;
  std::vector<std::vector<std::uint16_t>> y;
  for (RankInput& input : c.inputs) {
    for (auto& bits : input.x) bits = float_to_bf16(static_cast<float>(bits % 16));  // every sum is exact
  }
  for (const RankReceived& rank : reference::dispatch(c.params, c.inputs)) y.push_back(rank.recv_bf16);
  std::size_t rows = 0;
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    const RankInput& input = c.inputs[r];
    std::vector<CombineSource> sources;
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) sources.push_back({y[d].data(), c.bases[r][d]});
    std::vector<std::uint16_t> out(input.x.size(), 0x5555);
    const CombineArgs args{&c.plans[r],
                           sources,
                           nullptr,
                           out.data(),
                           c.params.hidden,
                           c.params.topk,
                           c.params.num_experts / c.params.num_ranks};
    host::combine_rows_with(c.choice, args, 0, input.num_tokens);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t token = i / c.params.hidden;
      const std::uint32_t copies = c.plans[r].begin[token + 1] - c.plans[r].begin[token];
      ASSERT_EQ(bf16_to_float(out[i]), static_cast<float>(copies) * bf16_to_float(input.x[i]))
          << "element " << i;
      rows += copies;
    }
  }
  EXPECT_GT(rows, 0u);
}

// Only the tokens of the range are touched.
TEST_P(Operations, RangesAreExact) {
  const host::Choice choice{GetParam(), host::Stores::kCached};
  constexpr std::uint32_t kTokens = 6;
  constexpr std::uint32_t kHidden = 256;
  const std::vector<std::int32_t> choices(kTokens, 0);
  RoutingPlan plan;
  ASSERT_FALSE(build_routing_plan({choices.data(), false, kTokens, 1, 1, 1}, plan).bad);
  const std::vector<std::uint16_t> y(std::size_t{kTokens} * kHidden, 0x3f80);
  const std::vector<CombineSource> sources = {{y.data(), 0}};
  std::vector<std::uint16_t> out(y.size(), 0x1234);
  const CombineArgs args{&plan, sources, nullptr, out.data(), kHidden, 1, 1};
  host::combine_rows_with(choice, args, 2, 4);
  host::combine_rows_with(choice, args, 5, 5);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t token = i / kHidden;
    ASSERT_EQ(out[i], token == 2 || token == 3 ? 0x3f80 : 0x1234) << "token " << token;
  }
}

TEST(OperationsChoice, StreamsOnlyLargeVolumes) {
  RoutingPlan plan;
  const std::vector<DispatchTarget> targets(1);
  DispatchArgs args;
  args.plan = &plan;
  args.targets = targets;
  args.hidden = 1024;
  plan.entries.resize(host::kStreamingVolume / 2048);
  EXPECT_EQ(host::dispatch_choice(args).stores, host::Stores::kCached);
  plan.entries.resize(plan.entries.size() + 1);
  EXPECT_EQ(host::dispatch_choice(args).stores, host::Stores::kStreaming);
  args.fp8 = true;
  EXPECT_EQ(host::dispatch_choice(args).stores, host::Stores::kCached);
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, Operations, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
