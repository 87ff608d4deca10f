// dispatch_rows and fill_rows, on every path of this CPU, against the reference: bit for bit, with outputs
// poisoned first and canaries around them.
#include "kernels_cases.h"

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::Layout;
using reference::RankInput;
using reference::RankReceived;

// What one destination receives, exactly as large as it must be.
struct Received {
  explicit Received(const Case& c)
      : rows(c.rules.recv_rows),
        x(rows * c.format().row_bytes, c.shift / 16 * 16),
        scales(rows * c.format().scale_bytes, c.shift),
        topk_idx(rows * c.choices_per_row() * (c.index64 ? 8 : 4), c.shift),
        topk_weights(rows * c.choices_per_row() * 4, c.shift),
        src(rows * 8, c.shift) {}
  DispatchTarget target() {
    return {x.as<void>(), scales.as<void>(), topk_idx.as<void>(), topk_weights.as<float>(),
            src.as<std::int32_t>()};
  }
  std::int64_t index(const Case& c, std::size_t i) const {
    return c.index64 ? topk_idx.as<std::int64_t>()[i] : topk_idx.as<std::int32_t>()[i];
  }
  void expect_intact() const {
    x.expect_intact("recv_x");
    scales.expect_intact("recv_scales");
    topk_idx.expect_intact("recv_topk_idx");
    topk_weights.expect_intact("recv_topk_weights");
    src.expect_intact("recv_src");
  }
  std::size_t rows;
  Guarded x, scales, topk_idx, topk_weights, src;
};

// All ranks that are there, to all destinations but `lost`.
void run_dispatch(const Case& c, std::vector<Received>& received, std::uint32_t lost = 0xffffffff,
                  bool own_choice = false) {
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    if (!c.is_there(r)) continue;
    std::vector<DispatchTarget> targets(c.params.num_ranks);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      if (c.is_there(d) && d != lost) targets[d] = received[d].target();
    }
    const RankInput& input = c.inputs[r];
    DispatchArgs args;
    args.plan = &c.plans[r];
    args.base = c.placements[r].base();
    args.x = input.x.data();
    args.x_scales = input.x_scales.empty() ? nullptr : input.x_scales.data();
    args.topk_weights = input.topk_weights.empty() ? nullptr : input.topk_weights.data();
    args.targets = targets;
    args.format = c.format();
    args.source_rank = r;
    args.topk = c.params.topk;
    args.experts_per_rank = c.experts_per_rank();
    args.index64 = c.index64;
    split(c.threads, input.num_tokens, [&](std::uint32_t begin, std::uint32_t end) {
      if (own_choice) {
        dispatch_rows(args, begin, end);
      } else {
        host::dispatch_rows_with(c.choice, args, begin, end);
      }
    });
  }
}

std::vector<Received> poisoned(const Case& c) {
  std::vector<Received> received;
  for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) received.emplace_back(c);
  return received;
}

void expect_filled(const Case& c, const Received& actual, const RankReceived& expected, std::size_t row) {
  const std::size_t x_bytes = c.format().row_bytes;
  const std::size_t scale_bytes = c.format().scale_bytes;
  const std::size_t choices = c.choices_per_row();
  expect_bits("recv_x", actual.x.as<std::uint8_t>() + row * x_bytes, expected.recv_x.data() + row * x_bytes,
              x_bytes);
  expect_bits("recv_scales", actual.scales.as<std::uint8_t>() + row * scale_bytes,
              expected.recv_scales.data() + row * scale_bytes, scale_bytes);
  for (std::size_t i = row * choices; i < (row + 1) * choices; ++i) {
    ASSERT_EQ(actual.index(c, i), expected.recv_topk_idx[i]) << "recv_topk_idx[" << i << "]";
  }
  expect_bits("recv_topk_weights", actual.topk_weights.as<float>() + row * choices,
              expected.recv_topk_weights.data() + row * choices, choices);
  expect_bits("recv_src", actual.src.as<std::int32_t>() + row * 2, expected.recv_src.data() + row * 2, 2);
}

void expect_marked(const Case& c, const Received& actual, std::size_t row) {
  const std::size_t choices = c.choices_per_row();
  for (std::size_t i = row * choices; i < (row + 1) * choices; ++i) {
    ASSERT_EQ(actual.index(c, i), -1);
    ASSERT_EQ(bits_of(actual.topk_weights.as<float>()[i]), 0u);
  }
  ASSERT_EQ(actual.src.as<std::int32_t>()[2 * row], -1);
  ASSERT_EQ(actual.src.as<std::int32_t>()[2 * row + 1], -1);
}

bool is_zero(const Guarded& guarded, std::size_t row, std::size_t bytes) {
  const auto* first = guarded.as<std::uint8_t>() + row * bytes;
  return std::all_of(first, first + bytes, [](std::uint8_t byte) { return byte == 0; });
}

bool is_untouched(const Case& c, const Received& actual, std::size_t row) {
  const auto poison = [row](const Guarded& guarded, std::size_t bytes) {
    return guarded.is_poison(row * bytes, (row + 1) * bytes);
  };
  return poison(actual.x, c.format().row_bytes) && poison(actual.scales, c.format().scale_bytes) &&
         poison(actual.topk_idx, std::size_t{c.choices_per_row()} * (c.index64 ? 8 : 4)) &&
         poison(actual.topk_weights, std::size_t{c.choices_per_row()} * 4) && poison(actual.src, 8);
}

bool is_filled(const RankReceived& expected, std::size_t row) {
  return row < expected.num_rows && expected.recv_src[2 * row] >= 0;
}

void expect_received(const Case& c, const Received& actual, const RankReceived& expected) {
  for (std::size_t row = 0; row < actual.rows; ++row) {
    SCOPED_TRACE(testing::Message() << "row " << row);
    if (is_filled(expected, row)) {
      expect_filled(c, actual, expected, row);
    } else {
      ASSERT_TRUE(is_untouched(c, actual, row)) << "nobody sends this row";
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  actual.expect_intact();
}

void expect_placement(const Placement& actual, const RankReceived& expected) {
  const auto as_vector = [](std::span<const std::int32_t> section) {
    return std::vector<std::int32_t>(section.begin(), section.end());
  };
  EXPECT_EQ(actual.num_recv_rows, expected.num_recv_rows);
  EXPECT_EQ(as_vector(actual.rank_offsets()), expected.rank_offsets);
  EXPECT_EQ(as_vector(actual.expert_counts()), expected.expert_counts);
  EXPECT_EQ(as_vector(actual.expert_offsets()), expected.expert_offsets);
  EXPECT_EQ(as_vector(actual.source_ranges()), expected.source_ranges);
}

class Dispatch : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(Dispatch, EqualsReference) {
  for (std::uint32_t seed = 0; seed < 500; ++seed) {
    const Case c = random_case(seed, GetParam());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    std::vector<Received> received = poisoned(c);
    run_dispatch(c, received);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      if (!c.is_there(d)) continue;
      SCOPED_TRACE(testing::Message() << "destination " << d);
      const RankReceived expected = reference::dispatch_to(c.params, c.inputs, d);
      expect_placement(c.placements[d], expected);
      expect_received(c, received[d], expected);
      if (HasFailure()) return;
    }
  }
}

// A rank that is lost after the routing was made: the others receive what they would have received.
TEST_P(Dispatch, SkipsARankThatIsNotThere) {
  for (std::uint32_t seed = 5000; seed < 5060; ++seed) {
    const Case c = random_case(seed, GetParam());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    const std::uint32_t lost = seed % c.params.num_ranks;
    std::vector<Received> received = poisoned(c);
    run_dispatch(c, received, lost);
    for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) {
      if (!c.is_there(d) || d == lost) continue;
      SCOPED_TRACE(testing::Message() << "destination " << d);
      expect_received(c, received[d], reference::dispatch_to(c.params, c.inputs, d));
      if (HasFailure()) return;
    }
  }
}

void run_fill(const Case& c, Received& received, const std::vector<RowRange>& ranges, bool zero) {
  std::uint32_t items = 0;
  for (const RowRange& range : ranges) items += range.count;
  FillArgs args;
  args.target = received.target();
  args.ranges = ranges;
  args.format = c.format();
  args.choices_per_row = c.choices_per_row();
  args.index64 = c.index64;
  args.zero = zero;
  split(c.threads == 1 ? 3 : c.threads, items,
        [&](std::uint32_t begin, std::uint32_t end) { fill_rows(args, begin, end); });
}

// Which rows nobody sends, by the definition: packed: those between an expert's rows and the next one's.
bool is_padding(const Case& c, const RankReceived& expected, std::size_t row) {
  return c.params.layout == Layout::kPacked && row < expected.num_rows && !is_filled(expected, row);
}

TEST(Fill, TouchesExactlyTheRowsThatNobodySends) {
  for (std::uint32_t seed = 7000; seed < 7300; ++seed) {
    const Case c = random_case(seed, &host::best_row_kernels());
    const std::uint32_t d = seed % c.params.num_ranks;
    if (!c.is_there(d)) continue;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    const bool all = seed % 2 == 0;
    const bool zero = seed % 3 == 0;
    const RankReceived expected = reference::dispatch_to(c.params, c.inputs, d);
    Received received(c);
    run_fill(c, received, unfilled_rows(c.rules, c.placements[d], all), zero);
    for (std::size_t row = 0; row < received.rows; ++row) {
      SCOPED_TRACE(testing::Message() << "row " << row);
      const bool wanted = all ? !is_filled(expected, row) : is_padding(c, expected, row);
      if (!wanted) {
        ASSERT_TRUE(is_untouched(c, received, row));
        continue;
      }
      expect_marked(c, received, row);
      const std::size_t bytes = c.format().row_bytes;
      const std::size_t scale_bytes = c.format().scale_bytes;
      ASSERT_TRUE(zero ? is_zero(received.x, row, bytes)
                       : received.x.is_poison(row * bytes, (row + 1) * bytes));
      ASSERT_TRUE(zero ? is_zero(received.scales, row, scale_bytes)
                       : received.scales.is_poison(row * scale_bytes, (row + 1) * scale_bytes));
      if (HasFailure()) return;
    }
    received.expect_intact();
  }
}

// dispatch_rows itself, through its own choice: small and, by its entries, large.
TEST(DispatchRows, EqualsReferenceWhateverItChooses) {
  const Case c = random_case(4, &host::best_row_kernels());
  const RankReceived expected = reference::dispatch_to(c.params, c.inputs, 0);
  for (int call = 0; call < 40; ++call) {
    SCOPED_TRACE(testing::Message() << "call " << call << ": " << c);
    std::vector<Received> received = poisoned(c);
    run_dispatch(c, received, 0xffffffff, true);
    expect_received(c, received[0], expected);
    if (HasFailure()) return;
  }
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, Dispatch, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
