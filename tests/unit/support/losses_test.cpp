// Which results of a combine a rank takes for right when ranks were lost and replaced.
#include "support/losses.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace epd::test {
namespace {

using Ranks = Losses::Ranks;

constexpr std::uint64_t kRouting = 5;

Case four_ranks() {
  Case c;
  c.seed = 80100;
  c.num_ranks = 4;
  c.num_experts = 16;
  c.max_tokens = 12;
  c.topk = 3;
  c.degrade = true;
  c.sum_ranks = 1;
  c.return_weights = abi::kReturnSum;
  return c;
}

// What a rank sees of its combines.
class LossesTest : public testing::TestWithParam<std::uint32_t> {
 protected:
  LossesTest() {
    epd_buffers_init(&buffers_);
    buffers_.out = out_.data();
    buffers_.out_weights = out_weights_.data();
    forget();
  }
  void forget() {
    std::fill(out_.begin(), out_.end(), static_cast<std::uint16_t>(kPoison << 8 | kPoison));
    std::memset(out_weights_.data(), kPoison, out_weights_.size() * sizeof(float));
  }
  std::size_t bytes_of(abi::Region region) const { return abi::region_bytes(case_.shape(), region); }
  // The result if these were lost at the dispatch, and those since; returns the dropped selections.
  std::uint32_t combine(const Ranks& at, const Ranks& since) {
    forget();
    const std::vector<Input> inputs = without_ranks(case_, all_, at);
    const auto made =
        kernels::reference::combine_to(case_.params(), inputs, make_answers(case_, kRouting, inputs, since),
                                       {case_.weighted, case_.return_weights}, rank_);
    std::copy(made.out.begin(), made.out.end(), out_.begin());
    std::copy(made.out_weights.begin(), made.out_weights.end(), out_weights_.begin());
    Ranks dropped = at;
    dropped.insert(since.begin(), since.end());
    return selections_of(case_, all_[rank_], dropped);
  }
  std::string check(std::uint32_t dropped) {
    return losses_.check_combine(buffers_, kRouting, all_, dropped);
  }
  std::uint32_t other(std::uint32_t step) const { return (rank_ + step) % case_.num_ranks; }

  const Case case_ = four_ranks();
  const std::uint32_t rank_ = GetParam();
  const std::vector<Input> all_ = make_inputs(case_, kRouting);
  Losses losses_{case_, rank_};
  std::vector<std::uint16_t> out_ = std::vector<std::uint16_t>(bytes_of(abi::Region::kOut) / 2);
  std::vector<float> out_weights_ = std::vector<float>(bytes_of(abi::Region::kOutWeights) / 4);
  epd_buffers_t buffers_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, LossesTest, testing::Range(0u, 4u));

// However often it does the combine again, and whoever else was replaced, seen or not.
TEST_P(LossesTest, ANewcomerHasNothingToCombine) {
  losses_.begin_epoch(3, {});
  EXPECT_EQ(check(0), "");
  losses_.begin_epoch(5, {});
  EXPECT_EQ(check(0), "");
  losses_.begin_epoch(6, {other(1)});
  EXPECT_EQ(check(0), "");
  losses_.begin_epoch(9, {other(2)});
  EXPECT_EQ(check(0), "");
  EXPECT_NE(check(1), "");
  out_.back() = 0;
  EXPECT_NE(check(0), "");
  forget();
  out_weights_.front() = 0;
  EXPECT_NE(check(0), "");
}

TEST_P(LossesTest, ANewcomerHasTheRoutingsThatItMakes) {
  losses_.begin_epoch(3, {});
  EXPECT_EQ(check(0), "");
  losses_.make_routing(kRouting);
  EXPECT_NE(check(0), "");
  EXPECT_EQ(check(combine({}, {})), "");
}

TEST_P(LossesTest, RanksThatWereSeenToBeLostAddNothing) {
  losses_.begin_epoch(1, {other(3)});
  losses_.make_routing(kRouting);
  EXPECT_EQ(check(combine({other(3)}, {})), "");
  EXPECT_NE(check(combine({}, {})), "");
  losses_.begin_epoch(2, {other(1)});  // the other one is back
  losses_.begin_epoch(3, {});
  EXPECT_EQ(check(combine({other(3)}, {other(1)})), "");
  EXPECT_NE(check(combine({other(3)}, {})), "");
  EXPECT_NE(check(combine({other(3)}, {other(1), other(2)})), "");
}

TEST_P(LossesTest, RanksMayHaveBeenReplacedUnseen) {
  losses_.begin_epoch(1, {});
  losses_.make_routing(kRouting);
  losses_.begin_epoch(3, {});
  EXPECT_EQ(check(combine({}, {other(1)})), "");
  EXPECT_NE(check(combine({}, {other(1)}) + 1), "");
  EXPECT_NE(check(combine({}, {})), "") << "who was replaced has come back with its rows";
  losses_.begin_epoch(5, {});
  EXPECT_EQ(check(combine({}, {other(1), other(2)})), "");
  const std::uint32_t dropped = combine({}, {other(1), other(2)});
  out_[0] ^= 1;
  EXPECT_NE(check(dropped), "");
}

// So it has tokens.
TEST_P(LossesTest, ARankThatMadeTheRoutingWasNotReplaced) {
  losses_.begin_epoch(1, {});
  losses_.make_routing(kRouting);
  losses_.begin_epoch(3, {});
  forget();
  EXPECT_NE(check(0), "") << "the output of a newcomer";
}

}  // namespace
}  // namespace epd::test
