// Engines that live and can't answer yet: their kernels wait for SMs that others hold. And streams that wait
// for engines.
#include "membership_fixture.h"

#include <limits>

namespace epd::membership {
namespace {

class Waits : public Membership {
 protected:
  explicit Waits() : Membership(2) {}

  void say_waits(std::uint32_t device, const std::string& text, std::uint64_t group = 1) {
    abi::GroupWaits message{group, {}};
    abi::set_text(message.text, text.data(), text.size());
    say(device, message);
  }
  void start_but_for_engine_1() {
    join(request(0, 2));
    join(request(1, 2));
    ready(0);
    take();
  }
  // The engine of device 1 says so every two seconds.
  void wait_for(std::uint64_t ms, const std::string& text = "rank 1 waits for cuda:1 to take the epoch") {
    for (; ms > 0; ms -= 2'000) {
      say_waits(1, text);
      clock_.advance_ms(2'000);
      tick();
    }
  }
};

TEST_F(Waits, AnEngineWhoseGroupWaitsForItsDeviceIsNotKilled) {
  start_but_for_engine_1();
  wait_for(58'000);
  EXPECT_TRUE(take().empty());
  ready(1);
  EXPECT_EQ(take(), (Lines{"joined session=10 request=100 rank=0", "joined session=11 request=101 rank=1"}));
  EXPECT_EQ(registry_.next_due_ns(), std::numeric_limits<std::uint64_t>::max());
}

TEST_F(Waits, OneThatSaysNothingAnyMoreIs) {
  start_but_for_engine_1();
  wait_for(20'000);
  clock_.advance_ms(7'999);
  tick();
  EXPECT_TRUE(take().empty());
  clock_.advance_ms(1);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
}

// The start fails alone: other groups, and the engines, know nothing of it.
TEST_F(Waits, TheJoinFailsInTimeAndSaysWhatWasWaitedFor) {
  start_but_for_engine_1();
  wait_for(60'000);
  EXPECT_EQ(take(), (Lines{"refused session=10 request=100 status=DEADLINE_EXCEEDED",
                           "refused session=11 request=101 status=DEADLINE_EXCEEDED",
                           "remove device=0 group=1", "remove device=1 group=1"}));
  for (const char* part :
       {"group \"g\" has all its ranks", "ranks 1; rank 1 waits for cuda:1 to take the epoch"})
    EXPECT_NE(refusal_.message().find(part), std::string::npos) << refusal_.message();
  say_waits(1, "late");  // crossed with the removal, which is still pending in time
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take(), (Lines{"kill device=0", "kill device=1"}));
}

// The others are stopped until then, and no join's deadline bounds that.
TEST_F(Waits, AStartAmidABreakHasItsDeadlineAllTheSame) {
  activate(2);
  engine_down(1, "killed");
  broken(0, 4);
  engine_up(1);
  take();
  wait_for(8'000);
  EXPECT_EQ(take(), (Lines{"release device=0 group=1"})) << "its clients need not wait so long";
  EXPECT_EQ(group().waits(), "; rank 1 waits for cuda:1 to take the epoch");
  wait_for(2'000);
  EXPECT_EQ(take(), (Lines{"kill device=1"}));
}

TEST_F(Waits, ItCountsOnlyForWhoOwesTheStart) {
  activate(2);
  say_waits(1, "nothing is owed");
  say_waits(0, "no such group", 77);
  EXPECT_EQ(registry_.next_due_ns(), std::numeric_limits<std::uint64_t>::max());
  request_break(0);
  take();
  say_waits(1, "the break is to be answered all the same");
  clock_.advance_ms(3'000);
  tick();
  EXPECT_EQ(take().back(), "kill device=1");
}

// Streams of their clients wait for what no engine will run.
class WaitingStreams : public Membership {
 protected:
  void activate_on_gpus(std::uint32_t ranks) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      JoinRequest r = request(rank, ranks);
      r.device_kind = abi::DeviceKind::kCuda;
      join(r);
    }
    for (const std::uint32_t device : {0u, 1u}) ready(device);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }
  void refuse(std::uint32_t device, std::uint32_t rank) {
    abi::RankRefused message{1, rank, StatusCode::kInvalidArgument, {}};
    abi::set_text(message.text, "the memory is none", 18);
    say(device, message);
  }
};

TEST_F(WaitingStreams, AnEngineThatWasAwayWhenTheGroupEndedLetsThemGo) {
  activate_on_gpus(5);  // ranks 0, 2, 4 on device 0
  engine_down(0, "killed");
  session_closed(14, "died");
  take();
  engine_up(0);
  EXPECT_EQ(take(), (Lines{"close device=0 group=1 rank=0", "close device=0 group=1 rank=2",
                           "close device=0 group=1 rank=4"}))
      << "whoever has memory: of rank 4 only the membership may be gone";
  ASSERT_EQ(group().phase(), GroupPhase::kFailing) << "engine 1 has not let go yet";
  broken(1, 0);
  for (const std::uint32_t rank : {1u, 3u}) stopped(rank, 0);
  broken(1, 0);
  take();
  ASSERT_EQ(group().phase(), GroupPhase::kLost);
  engine_down(0, "killed");
  take();
  engine_up(0);
  EXPECT_EQ(take(), (Lines{"close device=0 group=1 rank=0", "close device=0 group=1 rank=2"})) << "once more";
  engine_down(1, "killed");
  session_closed(11, "died");
  take();
  engine_up(1);
  EXPECT_EQ(take(), (Lines{"close device=1 group=1 rank=3"}));
}

TEST_F(WaitingStreams, HostDevicesHaveNone) {
  activate(4);
  engine_down(0, "killed");
  session_closed(11, "died");
  take();
  engine_up(0);
  EXPECT_EQ(take(), Lines{});
}

TEST_F(WaitingStreams, AnEngineThatWasAwayWhenARankWasLostLetsThemGo) {
  policy_ = LossPolicy::kDegrade;
  activate_on_gpus(4);  // ranks 0, 2 on device 0
  engine_down(0, "killed");
  evict(1, 2, "was evicted by operator");  // its session continues
  take();
  engine_up(0);
  EXPECT_EQ(take(), (Lines{"close device=0 group=1 rank=2", "start device=0 group=1 broken=1"}));
}

// A new engine can't map the rank's memory, and never serves it.
TEST_F(WaitingStreams, AnEngineThatRefusesARankLetsThemGo) {
  policy_ = LossPolicy::kDegrade;
  activate_on_gpus(4);
  engine_down(1, "killed");
  engine_up(1);
  take();
  refuse(0, 3);
  EXPECT_EQ(take(), (Lines{"stop_member device=1 group=1 rank=3"})) << "its own engine serves it";
  refuse(1, 1);
  EXPECT_EQ(take(), (Lines{"close device=1 group=1 rank=1", "stop_member device=1 group=1 rank=1"}));
}

class WaitsOfRejoined : public Waits {
 protected:
  // Rank 1 has died and come back; the group continues in epoch 3 when engine 1 has answered.
  void SetUp() override {
    policy_ = LossPolicy::kDegrade;
    activate(2);
    session_closed(11, "died");
    stopped(1, 4);
    broken(0, 4);
    broken(1, ~std::uint64_t{0});
    removed(1);
    JoinRequest again = request(1, 2);
    again.id.session.number = 77;
    join(again);
    broken(0, 4, 2);
    ready(1);
    take();
    ASSERT_EQ(group().epoch, 3u);
    resumed(0, 3);
  }
};

TEST_F(WaitsOfRejoined, ItsEngineIsNotKilled) {
  wait_for(30'000);
  EXPECT_TRUE(take().empty());
  resumed(1, 3);
  EXPECT_EQ(take(), (Lines{"joined session=77 request=101 rank=1"}));
}

TEST_F(WaitsOfRejoined, ItIsRefusedInTimeAndToldWhatWasWaitedFor) {
  wait_for(60'000);
  EXPECT_EQ(take().front(), "refused session=77 request=101 status=DEADLINE_EXCEEDED");
  EXPECT_NE(refusal_.message().find("who takes part; rank 1 waits for cuda:1 to take the epoch"),
            std::string::npos)
      << refusal_.message();
}

// A refusal named it twice.
TEST(WaitsOfGroups, WhomTwoEnginesWaitForIsNamedOnce) {
  Group group;
  for (const std::uint32_t device : {0u, 1u, 2u})
    group.engines[{1, device}].waits_for = device == 2 ? "for host:1" : "greeting of host:0 on node-a";
  EXPECT_EQ(group.waits(), "; for host:1; greeting of host:0 on node-a");
}

}  // namespace
}  // namespace epd::membership
