// Conformance: addresses, and how connections end.
#include "transport_flavors.h"

#include <cstring>

namespace epd::transport {
namespace {

class ConformanceEnds : public Conformance {};

TEST_P(ConformanceEnds, ItsAddressIsShortAndItsOwn) {
  auto a = world.open();
  auto b = world.open();
  EXPECT_LE(a->address().size(), kMaxAddressBytes);
  EXPECT_NE(a->address(), b->address());
  Result<PeerId> own = a->connect(a->address());
  EXPECT_EQ(own.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(own.status().message(), "transport address is this transport's own");
}

TEST_P(ConformanceEnds, APeerIsConnectedOnce) {
  auto a = world.open();
  auto b = world.open();
  Result<PeerId> first = a->connect(b->address());
  ASSERT_TRUE(first.ok());
  Result<PeerId> second = a->connect(b->address());
  EXPECT_EQ(second.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(second.status().message().find("peer " + std::to_string(*first)), std::string::npos)
      << second.status().message();
  ASSERT_TRUE(a->close(*first).ok());
  Result<PeerId> again = a->connect(b->address());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_NE(*again, *first);
}

TEST_P(ConformanceEnds, BadAddressesAreRefusedByName) {
  auto a = world.open();
  auto b = world.open();
  const Address& good = b->address();
  const auto refusal = [&](const Address& address) {
    Result<PeerId> peer = a->connect(address);
    EXPECT_FALSE(peer.ok());
    EXPECT_TRUE(peer.status().code() == StatusCode::kInvalidArgument ||
                peer.status().code() == StatusCode::kVersionMismatch)
        << peer.status().to_string();
    EXPECT_EQ(peer.status().message().rfind("transport address ", 0), 0u) << peer.status().message();
    return peer.status().message();
  };
  EXPECT_EQ(refusal({}), "transport address has 0 bytes; allowed: 40 .. 1024");
  EXPECT_EQ(refusal(Address(2000)), "transport address has 2000 bytes; allowed: 40 .. 1024");
  EXPECT_EQ(refusal(Address(100)), "transport address begins with 0x0; expected 0x54445045");
  Address longer = good;
  longer.push_back({});
  EXPECT_NE(refusal(longer).find("it has " + std::to_string(longer.size() - 40)), std::string::npos);
  Address format = good;
  format[4] = std::byte{9};
  EXPECT_EQ(refusal(format), "transport address is of format 9; expected 1");
  EXPECT_EQ(a->connect(format).status().code(), StatusCode::kVersionMismatch);
  Address kind = good;
  kind[6] = std::byte{7};
  EXPECT_EQ(refusal(kind).rfind("transport address is of kind 7 (unknown); expected ", 0), 0u);
  // Any bit, any end, any bytes.
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Address changed = good;
    changed[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    refusal(changed);
  }
  for (std::size_t bytes = 0; bytes < good.size(); ++bytes)
    refusal(Address(good.begin(), good.begin() + bytes));
  for (int i = 0; i < 1000; ++i) {
    Address garbage(random() % 1200);
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random());
    if (i % 2 == 0 && garbage.size() > 8) std::memcpy(garbage.data(), good.data(), 8);
    refusal(garbage);
  }
  EXPECT_TRUE(a->connect(good).ok());
}

TEST_P(ConformanceEnds, AnotherKindOfAddressIsRefused) {
  const Carrier other = GetParam().carrier == Carrier::kInProcess ? Carrier::kUcx : Carrier::kInProcess;
  auto a = world.open();
  auto b = World({other, false}, 0).open();
  const Status status = a->connect(b->address()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("is of kind"), std::string::npos) << status.message();
}

TEST_P(ConformanceEnds, NoSuchPeer) {
  auto a = world.end(1);
  for (const Status& status :
       {a->send(999, 10), a->flush(999), a->close(999), a->transport().facts(999).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kNotFound);
    EXPECT_EQ(status.message(), "no peer 999");
  }
}

TEST_P(ConformanceEnds, NobodyIsThere) {
  auto a = world.end(1);
  Address gone;
  {
    auto b = world.open();
    gone = b->address();
  }
  const PeerId peer = a->connect(gone);
  for (int i = 0; i < 10; ++i) (void)a->send(peer, 5000);
  (void)a->flush(peer);
  ASSERT_TRUE(run_until({a.get()}, [&] { return a->down(peer); }));
  EXPECT_EQ(a->unsettled(), 0u);
  const Status status = a->send(peer, 10);
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_NE(status.message().find("peer " + std::to_string(peer) + " is down"), std::string::npos);
  EXPECT_EQ(a->flush(peer).code(), StatusCode::kAborted);
  EXPECT_TRUE(a->close(peer).ok());
  EXPECT_EQ(a->close(peer).code(), StatusCode::kNotFound);
}

TEST_P(ConformanceEnds, WhoIsNoPeerIsNotHeard) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = a->connect(*b);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(send_patiently(*a, to_b, 700, {a.get(), b.get()}).ok());
  ASSERT_TRUE(run_until({a.get(), b.get()}, [&] {
    return b->transport().counters().dropped_unknown == 5 && a->unsettled() == 0;
  }));
  EXPECT_TRUE(b->received.empty());
  EXPECT_EQ(a->sent_ok(), 5u);
  b->connect(*a);
  ASSERT_TRUE(send_patiently(*a, to_b, 700, {a.get(), b.get()}).ok());
  EXPECT_TRUE(run_until({a.get(), b.get()}, [&] { return b->received.size() == 1; }));
}

TEST_P(ConformanceEnds, CloseWithMessagesInFlightBothWays) {
  auto a = world.end(1);
  auto b = world.end(2);
  auto bystander = world.end(3);
  const std::vector<End*> all = {a.get(), b.get(), bystander.get()};
  const PeerId by_to_a = introduce(*bystander, *a).first;
  const PeerId by_to_b = introduce(*bystander, *b).first;
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    const auto [to_b, to_a] = introduce(*a, *b);
    const std::size_t before = a->received_of(3) + b->received_of(3);
    std::size_t sent_by = 0;
    for (int i = 0; i < 60; ++i) {
      (void)a->send(to_b, random() % 100000);
      (void)b->send(to_a, random() % 100000);
      if (bystander->send(i % 2 == 0 ? by_to_a : by_to_b, 1000).ok()) ++sent_by;
      if (random() % 4 == 0) all[random() % 3]->turn();
    }
    (void)a->flush(to_b);
    const int turns = static_cast<int>(random() % 30);
    for (int i = 0; i < turns; ++i) all[random() % 3]->turn();
    ASSERT_TRUE(a->close(to_b).ok());  // from here the ends themselves see to it that nothing of it comes
    EXPECT_EQ(a->send(to_b, 10).code(), StatusCode::kNotFound);
    ASSERT_TRUE(run_until(all, [&] {
      return a->unsettled() + b->unsettled() + bystander->unsettled() == 0 &&
             a->received_of(3) + b->received_of(3) == before + sent_by;
    }));
    ASSERT_TRUE(b->close(to_a).ok());
    a->received.clear();
    b->received.clear();
  }
  EXPECT_FALSE(bystander->down(by_to_a));
  EXPECT_FALSE(bystander->down(by_to_b));
  EXPECT_EQ(bystander->sent_aborted(), 0u);
}

TEST_P(ConformanceEnds, AfterAFlushACloseTakesNothingBack) {
  auto a = world.end(1);
  auto b = world.end(2);
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    const auto [to_b, to_a] = introduce(*a, *b);
    const std::uint64_t flushed = a->flushed_ok();
    const std::size_t count = 1 + random() % 40;
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(send_patiently(*a, to_b, random() % 60000, {a.get(), b.get()}).ok());
    }
    ASSERT_TRUE(a->flush(to_b).ok());
    ASSERT_TRUE(run_until({a.get(), b.get()}, [&] { return a->flushed_ok() == flushed + 1; }));
    ASSERT_TRUE(a->close(to_b).ok());
    ASSERT_TRUE(
        run_until({a.get(), b.get()}, [&] { return b->received.size() == count && a->unsettled() == 0; }));
    ASSERT_TRUE(b->close(to_a).ok());
    b->received.clear();
  }
  EXPECT_EQ(a->sent_aborted(), 0u);
}

TEST_P(ConformanceEnds, AFlushOrACloseOfASilentPeerBlocksNobody) {
  Limits limits;
  limits.max_sends = 24;
  auto a = world.end(1, limits);
  auto b = world.end(2, limits);
  auto c = world.end(3);
  const PeerId to_b = introduce(*a, *b).first;
  const auto [to_c, c_to_a] = introduce(*a, *c);
  for (int refused = 0; refused < 200;) {  // b does not look
    refused = a->send(to_b, 1 << 20).ok() ? 0 : refused + 1;
    a->turn();
    if (a->unsettled() == 23) break;
  }
  ASSERT_TRUE(a->flush(to_b).ok());
  // Others are served meanwhile.
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(send_patiently(*a, to_c, 1000, {a.get(), c.get()}).ok());
  ASSERT_TRUE(run_until({a.get(), c.get()}, [&] { return c->received.size() == 50; }));
  EXPECT_EQ(a->flushed_ok(), 0u);
  EXPECT_GT(a->unsettled(), 1u);
  // A close does not wait either; what is under way settles when the peer ends.
  ASSERT_TRUE(a->close(to_b).ok());
  run_for({a.get(), c.get()}, 20);
  b->end();
  ASSERT_TRUE(run_until({a.get(), c.get()}, [&] { return a->unsettled() == 0; }));
  EXPECT_GT(a->sent_aborted(), 0u);
}

TEST_P(ConformanceEnds, ThePeersEndIsTold) {
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  b->end();
  ASSERT_TRUE(run_until({a.get()}, [&] { return a->down(to_b); }));
  EXPECT_FALSE(a->why(to_b).message().empty());
  // A successor has another address.
  b = world.end(4);
  introduce(*a, *b);
}

TEST_P(ConformanceEnds, AnEndWithEverythingInFlight) {
  for (int round = 0; round < 10; ++round) {
    auto a = world.end(1);
    auto b = world.end(2);
    auto c = world.end(3);  // connects to nobody
    const auto [to_b, to_a] = introduce(*a, *b);
    const PeerId to_c = a->connect(*c);
    a->hold = b->hold = true;
    for (int i = 0; i < 50; ++i) {
      (void)a->send(to_b, random() % 200000);
      (void)b->send(to_a, random() % 200000);
      (void)a->send(to_c, random() % 2000);
      if (random() % 3 == 0) b->turn();
    }
    (void)a->flush(to_b);
    for (std::size_t i = random() % 40; i > 0; --i) (random() % 2 == 0 ? a : b)->turn();
    switch (random() % 3) {
      case 0: a->end(); break;
      case 1: b->end(); break;
      default: c->end(); break;
    }
  }
}

// Connections that both sides close and open again, in no order: it settles.
TEST_P(ConformanceEnds, AgainAndAgain) {
  auto a = world.end(1);
  auto b = world.end(2);
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    const auto [to_b, to_a] = introduce(*a, *b);
    for (int i = 0; i < 5; ++i) (void)a->send(to_b, random() % 50000);
    End& first = random() % 2 == 0 ? *a : *b;
    End& second = &first == a.get() ? *b : *a;
    const PeerId first_peer = &first == a.get() ? to_b : to_a;
    const PeerId second_peer = &first == a.get() ? to_a : to_b;
    ASSERT_TRUE(first.close(first_peer).ok());
    if (random() % 2 == 0) {
      (void)second.send(second_peer, 1000);
      run_for({a.get(), b.get()}, 5);
    }
    ASSERT_TRUE(second.close(second_peer).ok());
    ASSERT_TRUE(run_until({a.get(), b.get()}, [&] { return a->unsettled() + b->unsettled() == 0; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Over, ConformanceEnds,
                         ::testing::Values(Flavor{Carrier::kInProcess, false},
                                           Flavor{Carrier::kInProcess, true}, Flavor{Carrier::kUcx, false},
                                           Flavor{Carrier::kUcx, true},
                                           Flavor{Carrier::kUcxRendezvous, false},
                                           Flavor{Carrier::kUcxRendezvous, true}),
                         [](const auto& flavor) { return name_of(flavor.param); });

}  // namespace
}  // namespace epd::transport
