// Conformance: what is sent comes once, whole or not at all; limits; room; sleeping.
#include "transport_flavors.h"

#include <poll.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace epd::transport {
namespace {

using std::chrono::steady_clock;

TEST_P(Conformance, EverySizeComesOnceAndWhole) {
  auto a = world.end(1);
  auto b = world.end(2);
  const auto [to_b, to_a] = introduce(*a, *b);
  std::vector<std::size_t> sizes = {0,  1,    2,    3,     7,     8,     63,    64,
                                    65, 1000, 7168, 14336, 65535, 65536, 65537, 1 << 20};
  for (std::size_t near : {8 << 10, 256 << 10}) {  // UCX's segments, less what it puts in front
    for (std::size_t less = 0; less <= 400; less += 40) sizes.push_back(near - less);
  }
  for (int i = 0; i < 20; ++i) sizes.push_back(random() % (1 << 20));
  std::shuffle(sizes.begin(), sizes.end(), random);
  for (std::size_t bytes : sizes) {
    ASSERT_TRUE(send_patiently(*a, to_b, bytes, {a.get(), b.get()}).ok());
    ASSERT_TRUE(send_patiently(*b, to_a, bytes, {a.get(), b.get()}).ok());
  }
  ASSERT_TRUE(run_until({a.get(), b.get()}, [&] {
    return a->received_of(2) == sizes.size() && b->received_of(1) == sizes.size() &&
           a->unsettled() + b->unsettled() == 0;
  }));
  EXPECT_EQ(a->sent_aborted() + b->sent_aborted(), 0u);
  std::multiset<std::uint64_t> came;
  for (const Received& message : b->received) came.insert(message.bytes);
  EXPECT_EQ(came, std::multiset<std::uint64_t>(sizes.begin(), sizes.end()));
}

TEST_P(Conformance, HeadersOfEverySize) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  for (std::size_t bytes = End::kLeastHeader; bytes <= kMaxHeaderBytes; ++bytes) {
    for (;;) {
      const Status status = a->send(to_b, bytes % 3 * 100, bytes);
      a->turn();
      b->turn();
      if (status.ok()) break;
      ASSERT_EQ(status.code(), StatusCode::kWouldBlock) << status.to_string();
    }
  }
  const std::size_t all = kMaxHeaderBytes - End::kLeastHeader + 1;
  ASSERT_TRUE(run_until({a.get(), b.get()}, [&] { return b->received.size() == all; }));
  std::set<std::size_t> sizes;
  for (const Received& message : b->received) sizes.insert(message.header_bytes);
  EXPECT_EQ(sizes.size(), all);
}

TEST_P(Conformance, NeitherHeaderNorBody) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  while (!a->transport().send(to_b, {}, {}, 77).ok()) a->turn();
  bool sent = false;
  bool received = false;
  const auto end = steady_clock::now() + std::chrono::seconds(20);
  while ((!sent || !received) && steady_clock::now() < end) {
    std::array<Event, 4> events;
    for (std::size_t i = a->transport().progress(events); i-- > 0;) {
      EXPECT_EQ(events[i].kind, EventKind::kSent);
      EXPECT_EQ(events[i].cookie, 77u);
      sent = true;
    }
    for (std::size_t i = b->transport().progress(events); i-- > 0;) {
      EXPECT_EQ(events[i].kind, EventKind::kReceived);
      EXPECT_TRUE(events[i].header.bytes().empty());
      EXPECT_EQ(events[i].body.bytes, 0u);
      b->transport().release(events[i].body);
      received = true;
    }
  }
  EXPECT_TRUE(sent && received);
}

TEST_P(Conformance, RandomTrafficAmongThree) {
  std::vector<std::unique_ptr<End>> ends;
  std::vector<End*> all;
  for (std::uint64_t i = 0; i < 3; ++i) {
    ends.push_back(world.end(i));
    all.push_back(ends.back().get());
    ends.back()->span = 1 + random() % 20;
  }
  std::map<std::pair<std::size_t, std::size_t>, PeerId> peers;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = i + 1; j < 3; ++j) {
      std::tie(peers[{i, j}], peers[{j, i}]) = introduce(*ends[i], *ends[j]);
    }
  }
  std::array<std::array<std::size_t, 3>, 3> sent{};
  for (int n = 0; n < 1500; ++n) {
    const std::size_t from = random() % 3;
    const std::size_t to = (from + 1 + random() % 2) % 3;
    const std::size_t bytes = random() % 4 != 0 ? random() % 500 : random() % 200000;
    ASSERT_TRUE(send_patiently(*ends[from], peers[{from, to}], bytes, all).ok());
    ++sent[from][to];
    if (random() % 3 == 0) ends[random() % 3]->turn();
  }
  ASSERT_TRUE(run_until(all, [&] {
    for (std::size_t i = 0; i < 3; ++i) {
      for (std::size_t j = 0; j < 3; ++j) {
        if (ends[j]->received_of(i) != sent[i][j]) return false;
      }
      if (ends[i]->unsettled() != 0) return false;
    }
    return true;
  }));
  for (const auto& end : ends) EXPECT_EQ(end->sent_aborted(), 0u);
}

TEST_P(Conformance, OneEventAtATimeIsEnough) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  a->span = b->span = 1;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(send_patiently(*a, to_b, 3000, {a.get(), b.get()}).ok());
  EXPECT_TRUE(
      run_until({a.get(), b.get()}, [&] { return b->received.size() == 200 && a->unsettled() == 0; }));
}

TEST_P(Conformance, WhatIsTooLargeIsRefusedByName) {
  Limits limits;
  limits.max_body_bytes = 5000;
  auto a = world.end(1, limits);
  auto b = world.end(2, limits);
  const PeerId to_b = introduce(*a, *b).first;
  const Status header = a->send(to_b, 0, kMaxHeaderBytes + 1);
  EXPECT_EQ(header.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(header.message(), "header has 257 bytes; allowed: 256");
  const Status body = a->send(to_b, 5001);
  EXPECT_EQ(body.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(body.message(), "body has 5001 bytes; allowed: 5000");
  EXPECT_TRUE(send_patiently(*a, to_b, 5000, {a.get(), b.get()}).ok());
  EXPECT_TRUE(run_until({a.get(), b.get()}, [&] { return b->received.size() == 1 && a->unsettled() == 0; }));
}

TEST_P(Conformance, ALargerMessageThanTheReceiverAllowsIsDroppedAndCounted) {
  Limits small;
  small.max_body_bytes = 100;
  auto a = world.end(1);
  auto b = world.end(2, small);
  const PeerId to_b = introduce(*a, *b).first;
  ASSERT_TRUE(send_patiently(*a, to_b, 101, {a.get(), b.get()}).ok());
  ASSERT_TRUE(send_patiently(*a, to_b, 100, {a.get(), b.get()}).ok());
  ASSERT_TRUE(run_until({a.get(), b.get()}, [&] {
    return b->received.size() == 1 && b->transport().counters().dropped_malformed == 1 && a->unsettled() == 0;
  }));
  EXPECT_EQ(b->received[0].bytes, 100u);
}

// The receiver does not look: the sender is told that there is no space, and never waits.
TEST_P(Conformance, ASenderIsHeldBackAndNotBlocked) {
  Limits limits;
  limits.max_sends = 24;
  auto a = world.end(1, limits);
  auto b = world.end(2, limits);
  const PeerId to_b = introduce(*a, *b).first;
  const std::uint64_t before = a->sent_ok();
  std::uint64_t accepted = 0;
  Status status;
  int refused_in_turn = 0;
  while (refused_in_turn < 200) {
    status = a->send(to_b, 1 << 20);
    a->turn();
    refused_in_turn = status.ok() ? 0 : refused_in_turn + 1;
    accepted += status.ok() ? 1 : 0;
    ASSERT_LT(accepted, 1000u) << "nothing holds the sender back";
  }
  EXPECT_EQ(status.code(), StatusCode::kWouldBlock);
  EXPECT_EQ(a->unsettled(), 24u);
  EXPECT_EQ(accepted, 24u + a->sent_ok() - before);
  const Status full = a->flush(to_b);
  EXPECT_EQ(full.code(), StatusCode::kWouldBlock);
  EXPECT_NE(full.message().find("24"), std::string::npos) << full.message();
  // All that was accepted arrives.
  EXPECT_TRUE(
      run_until({a.get(), b.get()}, [&] { return b->received.size() == accepted && a->unsettled() == 0; }));
  EXPECT_EQ(a->sent_aborted(), 0u);
}

TEST_P(Conformance, BodiesStayUntilTheyAreReleasedInAnyOrder) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  b->hold = true;
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(send_patiently(*a, to_b, 1 + random() % 9000, {a.get(), b.get()}).ok());
  }
  ASSERT_TRUE(
      run_until({a.get(), b.get()}, [&] { return b->received.size() == 300 && a->unsettled() == 0; }));
  std::shuffle(b->received.begin(), b->received.end(), random);
  while (b->received.size() > 100) {
    b->transport().release(b->received.back().body);
    b->received.pop_back();
  }
  b->hold = false;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(send_patiently(*a, to_b, 9000, {a.get(), b.get()}).ok());
  ASSERT_TRUE(
      run_until({a.get(), b.get()}, [&] { return b->received.size() == 200 && a->unsettled() == 0; }));
  // They outlive their sender, too; what is held at the end belongs to the transport.
  a->end();
  run_for({b.get()}, 20);
  for (std::size_t i = 0; i < 100; ++i) EXPECT_TRUE(b->intact(b->received[i])) << i;
  for (std::size_t i = 0; i < 50; ++i) b->transport().release(b->received[i].body);
}

TEST_P(Conformance, SleepsWhenThereIsNothingToDo) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  run_for({a.get(), b.get()}, 50);
  const double before = thread_cpu_ms();
  const auto end = steady_clock::now() + std::chrono::milliseconds(500);
  int turns = 0;
  for (; steady_clock::now() < end; ++turns) {
    b->turn();
    if (!b->transport().arm()) continue;
    pollfd fd{b->transport().wait_fd(), POLLIN, 0};
    ::poll(&fd, 1, kMaxSleepMs);
  }
  EXPECT_LT(turns, 60);
  EXPECT_LT(thread_cpu_ms() - before, 100.0);
  // A message wakes it.
  ASSERT_TRUE(run_until({b.get()}, [&] { return b->transport().arm(); }));
  ASSERT_TRUE(send_patiently(*a, to_b, 100, {a.get()}).ok());
  run_for({a.get()}, 20);
  pollfd fd{b->transport().wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&fd, 1, 5000), 1);
  EXPECT_TRUE(run_until({a.get(), b.get()}, [&] { return b->received.size() == 1; }));
}

// Each end on a thread of its own, which sleeps whenever it may.
TEST_P(Conformance, TwoThreadsThatSleep) {
  constexpr std::size_t kRounds = 300;
  auto a = world.end(1);
  auto b = world.end(2);
  const auto [to_b, to_a] = introduce(*a, *b);
  std::atomic<bool> failed = false;
  std::atomic<int> finished = 0;
  const auto play = [&](End& self, PeerId peer, std::uint64_t other, bool serves) {
    const auto end = steady_clock::now() + std::chrono::seconds(60);
    std::size_t sent = 0;
    bool told = false;
    while (finished < 2 && !failed) {
      const std::size_t came = self.received_of(other);
      const bool may_send = serves ? sent <= came : sent < came;
      if (may_send && sent < kRounds) {
        if (self.send(peer, 2000).ok()) ++sent;
        self.turn();
        continue;
      }
      if (!told && came == kRounds && sent == kRounds && self.unsettled() == 0) {
        told = true;
        ++finished;
      }
      self.turn();
      if (steady_clock::now() > end) failed = true;
      if (self.received_of(other) != came || !self.transport().arm()) continue;
      pollfd fd{self.transport().wait_fd(), POLLIN, 0};
      ::poll(&fd, 1, kMaxSleepMs);
    }
  };
  std::thread other([&, peer = to_a] { play(*b, peer, 1, false); });
  play(*a, to_b, 2, true);
  other.join();
  EXPECT_FALSE(failed);
  EXPECT_EQ(a->received_of(2), kRounds);
  EXPECT_EQ(b->received_of(1), kRounds);
}

INSTANTIATE_TEST_SUITE_P(Over, Conformance,
                         ::testing::Values(Flavor{Carrier::kInProcess, false},
                                           Flavor{Carrier::kInProcess, true}, Flavor{Carrier::kUcx, false},
                                           Flavor{Carrier::kUcx, true},
                                           Flavor{Carrier::kUcxRendezvous, false},
                                           Flavor{Carrier::kUcxRendezvous, true},
                                           Flavor{Carrier::kUcxShared, false}),
                         [](const auto& flavor) { return name_of(flavor.param); });

}  // namespace
}  // namespace epd::transport
