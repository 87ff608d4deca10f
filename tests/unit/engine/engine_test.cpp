// Engines of host devices: what they count, and whose rows they move first.

#include "engine_fixture.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

class EngineTest : public EngineFixture {
 protected:
  EngineTest() : EngineFixture("host") {}
};

// Rank 2 comes when the others have announced it.
TEST_F(EngineTest, WaitsRowsAndBusyTimeAreCounted) {
  const Mapping page = map_page(*engines_[0]);
  const auto inputs = fill(0);
  there_ = {0, 1};
  auto numbers = ask(dispatch_on(0), inputs);
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(takes_part(rank, 0, 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  numbers[2] = ring(2, dispatch_on(0), inputs[2].num_tokens);
  there_ = {0, 1, 2};
  await_ends(numbers);
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const abi::RankWaits waits = group_->waits(rank);
    EXPECT_EQ(waits.counts->operations, 1u);
    EXPECT_EQ(waits.counts->last_arrivals, rank == 2 ? 1u : 0u) << rank;
    EXPECT_TRUE(comes([&] { return group_->board(rank).next_index == 1; }));
    EXPECT_EQ(waits.counts->rows, ringers_[rank].end(numbers[rank]).num_recv_rows);
    const std::uint64_t for_2 = waits.peers[2].ready_ns;
    if (rank == 2) {
      EXPECT_EQ(waits.peers[0].ready_ns + waits.peers[1].ready_ns, 0u);
    } else {
      EXPECT_GE(for_2, 2'000'000u) << rank;
      EXPECT_LT(waits.peers[1 - rank].ready_ns, for_2);
    }
  }
  EXPECT_TRUE(comes([&] { return page.as<abi::EnginePage>()->busy_ns >= 2'000'000; }));
  run_and_check(1);
  EXPECT_EQ(group_->waits(0).counts->operations, 3u) << "combines too";
}

// While rows of one priority can move, those of a lower one stand back.
TEST_F(EngineTest, AHigherPriorityMovesFirst) {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.max_tokens = 20000;
  shape.hidden = 1024;
  std::vector<std::unique_ptr<RawSession>> sessions;
  std::vector<std::unique_ptr<RawGroup>> groups;
  std::vector<Ringer> ringers;
  const std::int32_t priorities[] = {-1, 5};
  for (std::uint64_t i = 0; i < 2; ++i) {
    sessions.push_back(std::make_unique<RawSession>(200 + i));
    sessions.back()->add_to(*engine_view_[0]);
    groups.push_back(std::make_unique<RawGroup>(200 + i, shape));
    groups.back()->priority = priorities[i];
    groups.back()->add_to_engine({engine_view_[0]}, {sessions.back().get()}, 0, false);
    ringers.push_back(groups.back()->host_ringer(0, *sessions.back()));
  }
  // Both as large, the low one first. The high one takes half of what both take, in equal turns it would take
  // all; unless the low one has run before, because this thread did not.
  bool overtakes = false;
  for (int i = 0; i < 20 && !overtakes; ++i) {
    std::uint32_t numbers[2];
    std::uint64_t ran_us[2];
    for (std::uint64_t each = 0; each < 2; ++each)
      numbers[each] = ringers[each].ring(dispatch_on(0), shape.max_tokens, 1);
    for (std::uint64_t each = 0; each < 2; ++each) {
      ASSERT_TRUE(ringers[each].ends_well(numbers[each], 30'000));
      ran_us[each] = ringers[each].end(numbers[each]).ran_us;
    }
    overtakes = ran_us[1] * 4 < ran_us[0] * 3;
  }
  EXPECT_TRUE(overtakes) << "the lower priority is not held back";
}

// It showed what the device has by itself, until it woke from its next sleep.
TEST(EngineSettings, ThePageShowedOldSmsUntilTheEngineTurnedAgain) {
  EngineThread engine(0);
  const Mapping map = Mapping::map(engine.page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::uint32_t sms = 1 + i % 2;
    engine.start();
    engine.send(LinkType::kSettings, abi::Settings{sms, 5000, 0, 20, "info"});
    ASSERT_EQ(engine.stop(), 0);
    EXPECT_EQ(map.as<abi::EnginePage>()->sms.load(), sms);
  }
}

}  // namespace
}  // namespace epd::test
