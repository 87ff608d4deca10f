// UCX between processes: a peer that is killed at any moment, or stopped.
#include "transport_child.h"
#include "transport_flavors.h"

#include <signal.h>
#include <unistd.h>
#include <chrono>
#include <filesystem>

namespace epd::transport {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kLarge = 4 << 20;

class UcxProcesses : public ::testing::TestWithParam<Carrier> {
 protected:
  UcxProcesses() : seed(test_seed()), random(seed), world({GetParam(), false}, seed) {}
  const std::uint64_t seed;
  std::mt19937_64 random;
  World world;
};

// Over shared memory UCX 1.13 does not tell of a peer that dies while messages are under way. With rendezvous
// it may abort (daemon/transport/README.md).
class UcxKilled : public UcxProcesses {};

double ms_since(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

TEST_P(UcxKilled, APeerKilledAtAnyMoment) {
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
    Child child(talks ? "talk" : "listen", name, GetParam());
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

TEST_P(UcxProcesses, AnIdlePeerThatIsKilledIsToldWithoutASend) {
  auto own = world.end(1);
  Child child("listen", 2, GetParam());
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1; }));
  run_for({own.get()}, 50);
  child.kill_and_reap();
  EXPECT_TRUE(run_until({own.get()}, [&] { return own->down(peer); }));
}

TEST_P(UcxKilled, CloseOfAPeerThatHasDiedUnnoticed) {
  auto own = world.end(1);
  for (std::uint64_t round = 0; round < 4; ++round) {
    const std::uint64_t name = 100 + round;
    Child child("talk", name, GetParam());
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

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

// Killed before they are connected to, while they are, and later.
TEST_P(UcxKilled, NoDescriptorIsLeftOfPeersThatHaveDied) {
  auto own = world.end(1);
  std::size_t before = 0;
  for (std::uint64_t round = 0; round < 24; ++round) {
    if (round == 3) before = open_descriptors();
    const std::uint64_t name = 100 + round;
    Child child("talk", name, GetParam());
    child.introduce(own->transport().address());
    if (round % 3 == 0) child.kill_and_reap();
    const PeerId peer = own->connect(child.address());
    (void)own->send(peer, 100);
    if (round % 3 == 1) run_for({own.get()}, random() % 20);
    if (round % 3 == 2) {
      ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(name) > 0; }));
    }
    if (round % 3 != 0) child.kill_and_reap();
    ASSERT_TRUE(run_until({own.get()}, [&] { return own->down(peer); }));
    ASSERT_TRUE(own->close(peer).ok());
    own->received.clear();
  }
  EXPECT_TRUE(run_until({own.get()}, [&] { return open_descriptors() <= before; }))
      << open_descriptors() << " descriptors, before: " << before;
}

// A peer that is stopped holds its sender back; nothing blocks, nobody is told that it is down; then all
// continues.
TEST_P(UcxProcesses, APeerThatIsStoppedAndGoesOn) {
  Limits limits;
  limits.max_sends = 24;
  auto own = world.end(1, limits);
  Child child("listen", 2, GetParam());
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1 && own->unsettled() == 0; }));
  child.signal(SIGSTOP);
  int turns = 0;
  const auto until = steady_clock::now() + std::chrono::milliseconds(1500);
  for (; steady_clock::now() < until; ++turns) {
    (void)own->send(peer, 1 << 20);
    own->turn();
    if (own->unsettled() == 24) ::usleep(1000);
  }
  EXPECT_EQ(own->unsettled(), 24u);
  EXPECT_GT(turns, 50) << "nothing waits for the peer";
  EXPECT_FALSE(own->down(peer));
  child.signal(SIGCONT);
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->unsettled() == 0; }));
  ASSERT_TRUE(own->flush(peer).ok());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->flushed_ok() == 1; }));
  EXPECT_EQ(own->sent_aborted(), 0u);
}

TEST_P(UcxKilled, CloseOfAStoppedPeerDoesNotWait) {
  Limits limits;
  limits.max_sends = 24;
  auto own = world.end(1, limits);
  Child child("listen", 2, GetParam());
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(2) == 1; }));
  child.signal(SIGSTOP);
  ASSERT_TRUE(run_until({own.get()}, [&] {
    (void)own->send(peer, 1 << 20);
    return own->unsettled() == 24;
  }));
  ASSERT_TRUE(own->close(peer).ok());
  run_for({own.get()}, 100);
  EXPECT_GT(own->unsettled(), 0u);
  child.kill_and_reap();
  EXPECT_TRUE(run_until({own.get()}, [&] { return own->unsettled() == 0; }));
  EXPECT_GT(own->sent_aborted(), 0u);
}

// A transfer from it or to it is in the middle when it is stopped and killed.
TEST_P(UcxKilled, APeerKilledWhileItIsStoppedInTheMiddle) {
  auto own = world.end(1, kChildLimits);
  for (std::uint64_t round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    const std::uint64_t name = 100 + round;
    Child child(round % 2 == 0 ? "listen" : "talk", name, GetParam());
    child.introduce(own->transport().address());
    const PeerId peer = own->connect(child.address());
    ASSERT_TRUE(run_until({own.get()}, [&] { return own->received_of(name) > 0; }));
    child.signal(SIGSTOP);
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(own->send(peer, kLarge - random() % 100000).ok());
    run_for({own.get()}, 5);
    child.signal(SIGCONT);
    run_for({own.get()}, static_cast<unsigned>(random() % 4));
    child.signal(SIGSTOP);
    run_for({own.get()}, 5);
    child.kill_and_reap();
    ASSERT_TRUE(run_until({own.get()}, [&] { return own->down(peer); }));
    ASSERT_TRUE(own->close(peer).ok());
    EXPECT_EQ(own->unsettled(), 0u);
    own->received.clear();
  }
  EXPECT_GT(own->sent_aborted(), 0u);
}

TEST_P(UcxProcesses, BodiesOfEverySizeThereAndBack) {
  auto own = world.end(1, kChildLimits);
  Child child("echo", 2, GetParam());
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  std::multiset<std::uint64_t> sizes;
  for (const std::size_t border : {std::size_t{1}, std::size_t{kTestRendezvousBytes}, std::size_t{256} << 10,
                                   std::size_t{1} << 20, kLarge, std::size_t{8} << 20}) {
    for (const std::size_t bytes : {border - 1, border, border + 1}) {
      if (bytes > kChildLimits.max_body_bytes) continue;
      ASSERT_TRUE(send_patiently(*own, peer, bytes, {own.get()}).ok());
      sizes.insert(bytes);
    }
  }
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received.size() >= sizes.size(); }));
  std::multiset<std::uint64_t> came;
  for (const Received& message : own->received) came.insert(message.bytes);
  EXPECT_EQ(came, sizes);
}

TEST_P(UcxProcesses, TwoHundredThousandSmallMessages) {
  constexpr std::size_t kMessages = 200000;
  auto own = world.end(1, kChildLimits);
  Child child("echo", 2, GetParam());
  child.introduce(own->transport().address());
  const PeerId peer = own->connect(child.address());
  own->span = 64;
  const auto begin = steady_clock::now();
  for (std::size_t i = 0; i < kMessages; ++i) {
    // The child's pending messages grow by no more than this.
    if (i % 1000 == 0) {
      ASSERT_TRUE(run_until({own.get()}, [&] { return own->received.size() + 4000 >= i; }));
    }
    ASSERT_TRUE(send_patiently(*own, peer, i % 64, {own.get()}).ok());
  }
  ASSERT_TRUE(run_until({own.get()}, [&] { return own->received.size() == kMessages; }));
  EXPECT_EQ(own->sent_aborted(), 0u);
  std::printf("%zu messages there and back in %.0f ms\n", kMessages, ms_since(begin));
}

INSTANTIATE_TEST_SUITE_P(Over, UcxProcesses,
                         ::testing::Values(Carrier::kUcx, Carrier::kUcxRendezvous, Carrier::kUcxShared),
                         [](const auto& carrier) {
                           return name_of({carrier.param, false});
                         });

INSTANTIATE_TEST_SUITE_P(Over, UcxKilled, ::testing::Values(Carrier::kUcx), [](const auto& carrier) {
  return name_of({carrier.param, false});
});

}  // namespace
}  // namespace epd::transport
