// dispatch_rows and fill_rows, on every path of this CPU, against the reference: bit for bit, with outputs
// poisoned first and canaries around them.
#include "kernels_received.h"

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::Layout;
using reference::RankInput;
using reference::RankReceived;

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
      ASSERT_TRUE(zero ? is_zero(received.x, row, bytes)
                       : received.x.is_poison(row * bytes, (row + 1) * bytes));
      for (std::uint32_t word = 0; word < c.format().scale_bytes / 4; ++word) {
        const std::size_t place = received.place_of_scale(c, row, word);
        ASSERT_TRUE(zero ? is_zero(received.scales, place / 4, 4)
                         : received.scales.is_poison(place, place + 4));
      }
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
