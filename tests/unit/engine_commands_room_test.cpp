// Commands beside other groups of the same GPU, whose kernels share its SMs.

#include "engine_commands_fixture.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>

namespace epd::test {
namespace {

class EngineCommandsRoomTest : public EngineCommandsFixture {
 protected:
  // To the dispatch on slot 0 that rank 0 has asked for by command `waits`: all end it well.
  void others_come(const std::vector<reference::RankInput>& inputs, std::uint32_t waits) {
    const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
    abi::Submission s = submission(2, Op::kDispatch, 0);
    s.num_tokens = inputs[2].num_tokens;
    session(2).submit(s);
    EXPECT_TRUE(ringers_[0].ended(waits));
    EXPECT_TRUE(ringers_[1].ended(last));
    EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  }
};

// A group of one rank, beside the fixture's.
abi::GroupShape alone() {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  return shape;
}

// A kernel that gives SMs away must end its command first, which waits for a peer.
TEST_F(EngineCommandsRoomTest, AnotherRankComesWhileACommandWaits) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(takes_part(0, 0, 0));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  RawGroup beside(8, alone(), "cuda", 1);
  beside.priority = 3;
  beside.add_to_engine({engine_view_[0]}, {&other}, 0, false);
  abi::Submission noop = submission(0, Op::kNoop, 0);
  session(0).submit(noop);
  EXPECT_EQ(session(0).wait()->status, StatusCode::kOk) << "the loop is not blocked";
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

// The supervisor is told that the engine lives, and by whom the SMs are held.
TEST_F(EngineCommandsRoomTest, AGroupThatWaitsForSmsSaysSoAndBeginsWhenTheyAreFree) {
  const bool submitted = random_() % 2 != 0;  // the operation that holds them, or a command
  SCOPED_TRACE(submitted ? "an operation waits" : "a command waits");
  const auto inputs = fill(0);
  const auto begin = [&](std::uint32_t rank) {
    if (by_stream(rank)) {
      ringers_[rank].ring(dispatch_on(0), inputs[rank].num_tokens, group_->epoch);
      return;
    }
    abi::Submission s = submission(rank, Op::kDispatch, 0);
    s.num_tokens = inputs[rank].num_tokens;
    session(rank).submit(s);
  };
  const std::uint32_t holder = submitted ? 2 : 0;
  begin(holder);
  ASSERT_TRUE(takes_part(holder, 0, holder));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  RawGroup beside(8, alone(), "cuda", 1);
  beside.commands = {1};
  beside.priority = 3;
  beside.announce({engine_view_[0]}, {&other}, 0, false);
  const std::string waits_for = "the kernel of rank 0 waits for SMs of cuda:0";
  const std::string held = ", which operation 0 of rank " + std::to_string(holder) + " of group 7 holds";
  std::string text;
  for (int i = 0; i < 2 || (i < 50 && text != waits_for + held); ++i) {  // a command is seen a moment later
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
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  Ringer ringer(beside.words(0));
  EXPECT_TRUE(ringer.ended(ringer.ring(kNoopCall, 0, 1)));
  EXPECT_EQ(ringer.failed(), 0u);
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(ringers_[rank].ended(0));
  next_ = 1;
  run_and_check(1);
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
}

// Its kernel has no SMs yet when it goes.
TEST_F(EngineCommandsRoomTest, ARankGoesBeforeAnotherHasMadeRoom) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  abi::Submission s = submission(2, Op::kDispatch, 0);  // the engine's other rank waits, too
  s.num_tokens = inputs[2].num_tokens;
  session(2).submit(s);
  ASSERT_TRUE(takes_part(0, 0, 0) && takes_part(2, 0, 2));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  for (const std::uint32_t commands : {0u, 1u, 1u}) {
    RawGroup beside(8, alone(), "cuda", 1);
    beside.commands = {commands};
    beside.announce({engine_view_[0]}, {&other}, 0, false);
    engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
    EXPECT_TRUE(commands == 0 || comes([&] { return beside.words(0).closed == 1; }));
  }
  session(0).submit(submission(0, Op::kNoop, 0));
  EXPECT_TRUE(session(0).wait().has_value()) << "the loop is blocked";
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
  EXPECT_TRUE(ringers_[0].ended(waits));
  EXPECT_TRUE(ringers_[1].ended(last));
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  next_ = 1;
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// Told amid a command, a kernel ends that first.
TEST_F(EngineCommandsRoomTest, HowLongKernelsTookToStopIsCounted) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  const auto stops = [&] { return kernel_stops(page); };
  run_and_check(0);
  for (std::uint32_t i = 0; i < 10; ++i) {
    const std::uint64_t before = stops();
    engines_[0]->send(LinkType::kSettings, abi::Settings{16 + 2 * (i % 2), 5000, 20, 2});
    run_and_check(i % kShape.depth);
    EXPECT_TRUE(comes([&] { return stops() >= before + 2; })) << "of both ranks, " << stops() - before;
  }
  constexpr std::chrono::milliseconds kWait{200};
  const auto inputs = fill(0);
  const std::uint32_t first = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  ASSERT_TRUE(takes_part(0, next_, 0));
  const std::uint64_t before = stops();
  engines_[0]->send(LinkType::kSettings, abi::Settings{16, 5000, 20, 2});
  ASSERT_TRUE(comes([&] { return stops() == before + 1; })) << "rank 2's, which has nothing to end";
  std::this_thread::sleep_for(kWait);
  others_come(inputs, first);
  EXPECT_TRUE(comes([&] { return stops() == before + 2 && page.kernel_stop_max_us.load() >= 100'000; }))
      << "the command's wait counts";
}

// A client that submits ahead always has something in flight.
TEST_F(EngineCommandsRoomTest, SmsChangeThoughSomethingIsAlwaysInFlight) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  std::array<std::uint32_t, 2> sms{16, 24};
  for (std::uint32_t i = 0; i < 20; ++i) {
    run_and_check(i % kShape.depth);
    std::vector<std::vector<reference::RankInput>> inputs;
    const auto submit = [&](std::uint32_t slot) {
      inputs.push_back(fill(slot));
      abi::Submission s = submission(2, Op::kDispatch, slot);
      s.num_tokens = inputs.back()[2].num_tokens;
      session(2).submit(s);
    };
    const auto others_come = [&](std::uint32_t slot) {
      for (const std::uint32_t rank : {0u, 1u})
        ringers_[rank].ring(dispatch_on(slot), inputs[slot][rank].num_tokens, group_->epoch);
      ++next_;
      return session(2).wait();
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
    engines_[0]->send(LinkType::kSettings, abi::Settings{sms[i % 2], 5000, 20, 2});
    EXPECT_TRUE(comes([&] { return kernel_stops(page) > before; })) << "rank 0's has nothing to end";
    submit(1);
    EXPECT_TRUE(in_flight(2));
    EXPECT_EQ(others_come(0)->status, StatusCode::kOk);
    EXPECT_TRUE(comes([&] { return kernel_stops(page) >= before + 2; })) << "rank 2's, at the latest now";
    EXPECT_TRUE(in_flight(1));
    EXPECT_EQ(others_come(1)->status, StatusCode::kOk);
  }
}

}  // namespace
}  // namespace epd::test
