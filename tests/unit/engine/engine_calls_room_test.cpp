// Calls beside other groups of the same GPU, whose kernels share its SMs.

#include "engine_calls_fixture.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>

namespace epd::test {
namespace {

class EngineCallsRoomTest : public EngineCallsFixture {
 protected:
  // To the dispatch on slot 0 that rank 0 has asked for by call `waits`: all end it well.
  void others_come(const std::vector<reference::RankInput>& inputs, std::uint32_t waits) {
    const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
    const std::uint32_t of_host = ring(2, dispatch_on(0), inputs[2].num_tokens);
    EXPECT_TRUE(ringers_[0].ended(waits));
    EXPECT_TRUE(ringers_[1].ended(last));
    EXPECT_TRUE(ends_well(2, of_host));
  }
};

// A group of one rank, beside the fixture's.
abi::GroupShape alone() {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  return shape;
}

// A kernel that gives SMs away must end its call first, which waits for a peer.
TEST_F(EngineCallsRoomTest, AnotherRankComesWhileACommandWaits) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(begins_alone(0, 0));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  RawGroup beside(8, alone(), "cuda", 1);
  beside.calls = true;
  beside.priority = 3;
  beside.announce({engine_view_[0]}, {&other}, 0, false);
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupWaits).has_value()) << "the loop is blocked";
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  others_come(inputs, waits);
  next_ = 1;
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
  for (const std::int32_t priority : {7, -8}) {  // and shares change once more
    engine_view_[0]->send(LinkType::kGroupSettings, abi::GroupSettings{kGroup, 0, priority});
    for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
  }
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
}

// As long as a rank of the same device has not called the same operation, the rank's other ring waits too.
TEST_F(EngineCallsRoomTest, ACallOfTheOtherRingComesBehindOneThatWaitsForARankOfTheDevice) {
  Ringer host(group_->words(0), group_->results(0), true);
  for (std::uint32_t i = 0; i < 20; ++i) {
    const auto inputs = fill(0);
    const std::uint32_t before = host.ring(kNoopCall, 0, group_->epoch);
    const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
    EXPECT_TRUE(ends_well(2, ring(2, kNoopCall)));
    EXPECT_FALSE(ringers_[0].ended(waits, 5));
    EXPECT_FALSE(takes_part(0, i, 0, 0)) << "a call that came with another ring's";
    const std::uint32_t noop = host.ring(kNoopCall, 0, group_->epoch);
    EXPECT_FALSE(host.ended(noop, 5));
    others_come(inputs, waits);
    EXPECT_TRUE(host.ended(before)) << "whichever was found first";
    EXPECT_TRUE(host.ended(noop));
    next_ = i + 1;
  }
  run_and_check(1);
}

// The supervisor is told that the engine lives, and by whom the SMs are held.
TEST_F(EngineCallsRoomTest, AGroupThatWaitsForSmsSaysSoAndBeginsWhenTheyAreFree) {
  const bool of_host = random_() % 2 != 0;  // the call that holds them
  SCOPED_TRACE(of_host ? "a call of a host's waits" : "a call of a stream's waits");
  const auto inputs = fill(0);
  const auto begin = [&](std::uint32_t rank) { ring(rank, dispatch_on(0), inputs[rank].num_tokens); };
  const std::uint32_t holder = of_host ? 2 : 0;
  begin(holder);
  ASSERT_TRUE(begins_alone(holder, 0));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  RawGroup beside(8, alone(), "cuda", 1);
  beside.calls = true;
  beside.priority = 3;
  beside.announce({engine_view_[0]}, {&other}, 0, false);
  const std::string waits_for = "the kernel of rank 0 waits for SMs of cuda:0";
  const std::string held = ", which operation 0 of rank " + std::to_string(holder) + " of group 7 holds";
  std::string text;
  for (int i = 0; i < 2 || (i < 50 && text != waits_for + held); ++i) {  // a call is seen a moment later
    const auto waits = engine_view_[0]->expect(LinkType::kGroupWaits);
    ASSERT_TRUE(waits.has_value());
    const auto body = waits->read<abi::GroupWaits>().value();
    EXPECT_EQ(body.group_id, 8u);
    text = body.text;
    EXPECT_TRUE(text.starts_with(waits_for)) << text;
  }
  EXPECT_EQ(text, waits_for + held);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    if (rank != holder) begin(rank);
  }
  const auto ready = engine_view_[0]->expect(LinkType::kGroupReady);
  ASSERT_TRUE(ready.has_value());
  EXPECT_EQ(ready->read<abi::GroupReady>().value().group_id, 8u);
  EXPECT_EQ(ready->read<abi::GroupReady>().value().status, StatusCode::kOk);
  EXPECT_TRUE(ends_well(2, 0));
  Ringer ringer(beside.words(0), beside.results(0));
  EXPECT_TRUE(ringer.ended(ringer.ring(kNoopCall, 0, 1)));
  EXPECT_EQ(ringer.failed(), 0u);
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(ringers_[rank].ended(0));
  next_ = 1;
  run_and_check(1);
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
}

// Its kernel has no SMs yet when it goes.
TEST_F(EngineCallsRoomTest, ARankGoesBeforeAnotherHasMadeRoom) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  const std::uint32_t of_host = ring(2, dispatch_on(0), inputs[2].num_tokens);  // the engine's other rank
  ASSERT_TRUE(takes_part(0, 0, 0) && takes_part(2, 0, 2));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  for (int times = 0; times < 3; ++times) {
    RawGroup beside(8, alone(), "cuda", 1);
    beside.calls = true;
    beside.announce({engine_view_[0]}, {&other}, 0, false);
    engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
    EXPECT_TRUE(comes([&] { return beside.words(0).closed == 1; }));
  }
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
  EXPECT_TRUE(ringers_[0].ended(waits));
  EXPECT_TRUE(ringers_[1].ended(last));
  EXPECT_TRUE(ends_well(2, of_host));
  next_ = 1;
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// Told amid a call, a kernel ends that first.
TEST_F(EngineCallsRoomTest, HowLongKernelsTookToStopIsCounted) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  const auto stops = [&] { return kernel_stops(page); };
  run_and_check(0);
  for (std::uint32_t i = 0; i < 10; ++i) {
    const std::uint64_t before = stops();
    engines_[0]->send(LinkType::kSettings, abi::Settings{16 + 2 * (i % 2), 5000, 20, "info"});
    run_and_check(i % kShape.depth);
    EXPECT_TRUE(comes([&] { return stops() >= before + 2; })) << "of both ranks, " << stops() - before;
  }
  constexpr std::chrono::milliseconds kWait{200};
  const auto inputs = fill(0);
  const std::uint32_t first = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(begins_alone(0, next_));
  const std::uint64_t before = stops();
  engines_[0]->send(LinkType::kSettings, abi::Settings{16, 5000, 20, "info"});
  ASSERT_TRUE(comes([&] { return stops() == before + 1; })) << "rank 2's, which has nothing to end";
  std::this_thread::sleep_for(kWait);
  others_come(inputs, first);
  EXPECT_TRUE(comes([&] { return stops() == before + 2 && page.kernel_stop_max_us.load() >= 100'000; }))
      << "the call's wait counts";
}

// A client that submits ahead always has something in flight.
TEST_F(EngineCallsRoomTest, SmsChangeThoughSomethingIsAlwaysInFlight) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  std::array<std::uint32_t, 2> sms{16, 24};
  for (std::uint32_t i = 0; i < 20; ++i) {
    run_and_check(i % kShape.depth);
    std::vector<std::vector<reference::RankInput>> inputs;
    std::vector<std::uint32_t> of_host;
    const auto submit = [&](std::uint32_t slot) {
      inputs.push_back(fill(slot));
      of_host.push_back(ring(2, dispatch_on(slot), inputs.back()[2].num_tokens));
    };
    const auto others_come = [&](std::uint32_t slot) {
      for (const std::uint32_t rank : {0u, 1u})
        ringers_[rank].ring(dispatch_on(slot), inputs[slot][rank].num_tokens, group_->epoch);
      ++next_;
      return ends_well(2, of_host[slot]);
    };
    const auto in_flight = [&](std::ptrdiff_t wanted) {
      return comes([&] {
        return wanted == std::count_if(std::begin(page.ops), std::end(page.ops),
                                       [](const abi::OpView& op) { return op.ticket.load() != 0; });
      });
    };
    submit(0);
    EXPECT_TRUE(in_flight(1));
    const std::uint64_t before = kernel_stops(page);
    engines_[0]->send(LinkType::kSettings, abi::Settings{sms[i % 2], 5000, 20, "info"});
    EXPECT_TRUE(comes([&] { return kernel_stops(page) > before; })) << "rank 0's has nothing to end";
    submit(1);
    EXPECT_TRUE(in_flight(2));
    EXPECT_TRUE(others_come(0));
    EXPECT_TRUE(comes([&] { return kernel_stops(page) >= before + 2; })) << "rank 2's, at the latest now";
    EXPECT_TRUE(in_flight(1));
    EXPECT_TRUE(others_come(1));
  }
}

}  // namespace
}  // namespace epd::test
