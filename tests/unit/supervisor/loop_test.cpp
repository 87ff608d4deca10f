// The loop and its clock: nothing is judged late that lies in its socket, and no time counts in which the
// loop was stopped.
#include "loop.h"

#include "common/packet.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

class LoopTime : public testing::Test {
 protected:
  std::uint64_t now_ms() const { return (clock_.now_ns() - begin_ns_) / kMsNs; }
  void look_after(std::uint64_t ms, std::uint64_t wanted_ms) {
    real_.advance_ms(ms);
    clock_.look(wanted_ms * kMsNs);
  }

  ManualClock real_;
  LoopClock clock_{real_};
  const std::uint64_t begin_ns_ = real_.now_ns();
};

TEST_F(LoopTime, MovesOnlyWhenTheLoopLooks) {
  real_.advance_ms(30);
  EXPECT_EQ(now_ms(), 0u);
  clock_.look(0);
  EXPECT_EQ(now_ms(), 30u);
}

TEST_F(LoopTime, CountsWhatWasSleptAndALittleMore) {
  look_after(2500, 2500);
  EXPECT_EQ(now_ms(), 2500u);
  look_after(2600, 2500);
  EXPECT_EQ(now_ms(), 5100u);
  look_after(10, 2500);  // something came
  EXPECT_EQ(now_ms(), 5110u);
}

TEST_F(LoopTime, HardlyCountsAPause) {
  look_after(60'000, 1'000);  // stopped in its sleep
  EXPECT_EQ(now_ms(), 100u);
  look_after(60'000, 0);  // and at work
  EXPECT_EQ(now_ms(), 200u);
}

// Half a second late: the pause may have been a second long.
TEST_F(LoopTime, TakesOffTwiceWhatShows) {
  look_after(3'000, 2'500);
  EXPECT_EQ(now_ms(), 2'000u);
}

// However slow its turns are, a deadline passes in the end.
TEST_F(LoopTime, NeverStandsForGood) {
  for (int i = 0; i < 50; ++i) look_after(1'000, 0);
  EXPECT_EQ(now_ms(), 5'000u);
}

// A peer whose answer is pending until a deadline.
class LoopDeadlines : public LoopTime {
 protected:
  static constexpr std::uint64_t kAllowedMs = 300;

  void SetUp() override {
    loop_ = std::move(Loop::create(clock_)).value();
    ASSERT_TRUE(loop_->add(link_.first.get(), EPOLLIN, [this](std::uint32_t) { read(); }).ok());
    due_ns_ = clock_.now_ns() + kAllowedMs * kMsNs;
  }
  void read() {
    char bytes[8];
    if (::recv(link_.first.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) answered_ = true;
  }
  void answer() const { ASSERT_EQ(::send(link_.second.get(), "x", 1, 0), 1); }
  // As the parts of the daemon do it.
  std::uint64_t judge() {
    if (!answered_ && due_ns_ <= clock_.now_ns()) late_ = true;
    return answered_ || late_ ? std::numeric_limits<std::uint64_t>::max() : due_ns_;
  }
  // Each turn does the next of these, then judges; the loop ends after the last.
  void run(const std::vector<std::function<void()>>& turns) {
    std::size_t next = 0;
    loop_->run([&] {
      const std::uint64_t due_ns = judge();
      if (next == turns.size()) {
        loop_->stop();
      } else {
        turns[next++]();
      }
      // The real clock is ours: it must not be slept by.
      return std::min(due_ns, clock_.now_ns());
    });
  }

  std::pair<UniqueFd, UniqueFd> link_ = std::move(make_socketpair()).value();
  std::unique_ptr<Loop> loop_;
  std::uint64_t due_ns_ = 0;
  bool answered_ = false;
  bool late_ = false;
};

TEST_F(LoopDeadlines, APeerThatIsSilentIsLate) {
  const auto step = [this] { real_.advance_ms(80); };
  run({step, step, step, step, step});
  EXPECT_TRUE(late_);
}

TEST_F(LoopDeadlines, AnAnswerThatCameWhileATurnWasStuckIsRead) {
  run({[this] {
         answer();
         real_.advance_ms(10 * kAllowedMs);
       },
       [] {}});
  EXPECT_TRUE(answered_);
  EXPECT_FALSE(late_);
}

// The handler of another watch takes long, and the answer comes meanwhile: after this pass has found its
// events.
TEST_F(LoopDeadlines, AnAnswerThatCameWhileAHandlerWasStuckIsRead) {
  const UniqueFd other = std::move(make_eventfd()).value();
  bool stuck = false;
  ASSERT_TRUE(loop_
                  ->add(other.get(), EPOLLIN,
                        [&](std::uint32_t) {
                          if (!std::exchange(stuck, true)) {
                            answer();
                            real_.advance_ms(10 * kAllowedMs);
                          }
                        })
                  .ok());
  ring_eventfd(other.get());
  run({[] {}, [] {}, [] {}});
  EXPECT_TRUE(answered_);
  EXPECT_FALSE(late_);
}

// The whole machine was stopped: its peer needs time to answer, too.
TEST_F(LoopDeadlines, APeerThatStoodStillAsWellHasTimeToAnswer) {
  run({[this] { real_.advance_ms(10 * kAllowedMs); }, [] {}, [this] { answer(); }, [] {}});
  EXPECT_TRUE(answered_);
  EXPECT_FALSE(late_);
}

// More watches than any batch of events: all are handled before the turn.
TEST_F(LoopDeadlines, EveryReadableWatchIsHandledBeforeTheTurn) {
  constexpr std::size_t kMany = 500;
  std::vector<UniqueFd> others;
  std::size_t handled = 0;
  for (std::size_t i = 0; i < kMany; ++i) {
    others.push_back(std::move(make_eventfd()).value());
    ring_eventfd(others.back().get());
    ASSERT_TRUE(loop_->add(others.back().get(), EPOLLIN, [&](std::uint32_t) { ++handled; }).ok());
  }
  run({[] {}, [&] { EXPECT_EQ(handled, kMany); }});
  EXPECT_EQ(handled, 2 * kMany);
}

}  // namespace
}  // namespace epd::supervisor
