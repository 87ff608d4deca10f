// UCX between processes: a peer that is killed at any moment, or stopped.
#include "transport_child.h"
#include "transport_flavors.h"

#include <signal.h>
#include <unistd.h>
#include <chrono>

namespace epd::transport {
namespace {

using std::chrono::steady_clock;

class UcxProcesses : public ::testing::Test {
 protected:
  UcxProcesses() : seed(test_seed()), random(seed), world({Carrier::kUcx, false}, seed) {}
  const std::uint64_t seed;
  std::mt19937_64 random;
  World world;
};

double ms_since(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

TEST_F(UcxProcesses, APeerKilledAtAnyMoment) {
  auto own = world.end(1);
  auto bystander = world.end(3);
  const auto [to_bystander, from_bystander] = introduce(*own, *bystander);
  const std::vector<End*> all = {own.get(), bystander.get()};
  double longest = 0;
  for (std::uint64_t round = 0; round < 16; ++round) {
    SCOPED_TRACE(round);
    const bool talks = round % 2 == 0;
    const bool sends = round % 4 < 2;
    const std::uint64_t name = 100 + round;
    Child child(talks ? "talk" : "listen", name);
    child.introduce(own->transport().address());
    const PeerId peer = own->connect(child.address());
    // Every fourth dies while the connection is being made.
    if (round % 4 != 3) {
      ASSERT_TRUE(run_until(all, [&] { return own->received_of(name) > 0; }));
    }
    const auto until = steady_clock::now() + std::chrono::microseconds(random() % 20000);
    std::size_t to_others = 0;
    while (steady_clock::now() < until) {
      if (sends) (void)own->send(peer, random() % 300000);
      if (own->send(to_bystander, 100).ok()) ++to_others;
      own->turn();
      bystander->turn();
    }
    if (sends) (void)own->flush(peer);
    child.kill_and_reap();
    const auto begin = steady_clock::now();
    ASSERT_TRUE(run_until(all, [&] { return own->down(peer); }));
    longest = std::max(longest, ms_since(begin));
    EXPECT_EQ(own->send(peer, 10).code(), StatusCode::kAborted);
    ASSERT_TRUE(own->close(peer).ok());
    ASSERT_TRUE(
        run_until(all, [&] { return own->unsettled() == 0 && bystander->received.size() == to_others; }));
    own->received.clear();
    bystander->received.clear();
  }
  EXPECT_FALSE(own->down(to_bystander));
  std::printf("killed peers were told after at most %.1f ms\n", longest);
}

TEST_F(UcxProcesses, AnIdlePeerThatIsKilledIsToldWithoutASend) {
  auto own = world.end(1);
  Child child("listen");
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1; }));
  run_for({own.get()}, 50);
  child.kill_and_reap();
  EXPECT_TRUE(run_until({own.get()}, [&] { return own->down(peer); }));
}

TEST_F(UcxProcesses, CloseOfAPeerThatHasDiedUnnoticed) {
  auto own = world.end(1);
  for (std::uint64_t round = 0; round < 4; ++round) {
    const std::uint64_t name = 100 + round;
    Child child("talk", name);
    child.introduce(own->transport().address());
    const PeerId peer = own->connect(child.address());
    ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(name) > 0; }));
    own->received.clear();
    for (int i = 0; i < 10; ++i) (void)own->send(peer, 200000);
    child.kill_and_reap();
    ASSERT_TRUE(own->close(peer).ok());
    ASSERT_TRUE(run_until({own.get()}, [&] { return own->unsettled() == 0; }));
    EXPECT_TRUE(own->received.empty());
  }
}

// Stopped, a peer holds its sender back; nothing blocks, nobody is told that it is down; then all goes on.
TEST_F(UcxProcesses, APeerThatIsStoppedAndGoesOn) {
  Limits limits;
  limits.max_sends = 24;
  auto own = world.end(1, limits);
  Child child("listen");
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1 && own->unsettled() == 0; }));
  child.signal(SIGSTOP);
  auto longest = steady_clock::duration::zero();
  const auto until = steady_clock::now() + std::chrono::milliseconds(1500);
  while (steady_clock::now() < until) {
    const auto begin = steady_clock::now();
    (void)own->send(peer, 1 << 20);
    own->turn();
    longest = std::max(longest, steady_clock::now() - begin);
    if (own->unsettled() == 24) ::usleep(1000);
  }
  EXPECT_EQ(own->unsettled(), 24u);
  EXPECT_LT(longest, std::chrono::seconds(1));
  EXPECT_FALSE(own->down(peer));
  child.signal(SIGCONT);
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->unsettled() == 0; }));
  ASSERT_TRUE(own->flush(peer).ok());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->flushed_ok() == 1; }));
  EXPECT_EQ(own->sent_aborted(), 0u);
}

TEST_F(UcxProcesses, CloseOfAStoppedPeerDoesNotWait) {
  Limits limits;
  limits.max_sends = 24;
  auto own = world.end(1, limits);
  Child child("listen");
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1; }));
  child.signal(SIGSTOP);
  ASSERT_TRUE(run_until({own.get()}, [&] {
    (void)own->send(peer, 1 << 20);
    return own->unsettled() == 24;
  }));
  const auto begin = steady_clock::now();
  ASSERT_TRUE(own->close(peer).ok());
  EXPECT_LT(ms_since(begin), 1000.0);
  run_for({own.get()}, 100);
  EXPECT_GT(own->unsettled(), 0u);
  child.kill_and_reap();
  EXPECT_TRUE(run_until({own.get()}, [&] { return own->unsettled() == 0; }));
  EXPECT_GT(own->sent_aborted(), 0u);
}

}  // namespace
}  // namespace epd::transport
