// The decorator by itself: that its faults happen, and are the same for the same seed.
#include "transport_flavors.h"

#include <algorithm>

namespace epd::transport {
namespace {

struct Pair {
  Pair(std::uint64_t seed, const FaultRates& rates) {
    Network network;
    Result<std::unique_ptr<Transport>> inner = network.open({});
    auto made = make_faulty(std::move(inner).value(), seed, rates);
    faulty = made.get();
    a = std::make_unique<End>(std::move(made), 1);
    b = std::make_unique<End>(std::move(network.open({})).value(), 2);
    std::tie(to_b, to_a) = introduce(*a, *b);
    all = {a.get(), b.get()};
  }
  FaultyTransport* faulty = nullptr;
  std::unique_ptr<End> a;
  std::unique_ptr<End> b;
  PeerId to_b = 0;
  PeerId to_a = 0;
  std::vector<End*> all;
};

// What the two saw, as text.
std::string history(std::uint64_t seed) {
  FaultRates rates;
  rates.refuse_percent = 10;
  rates.delay_percent = 40;
  rates.late_percent = 40;
  rates.cut_per_mille = 20;
  rates.down_per_mille = 3;
  rates.max_turns = 9;
  Pair pair(seed, rates);
  std::string text = pair.faulty->describe() + "\n";
  for (int i = 0; i < 300; ++i) {
    text += status_name(pair.a->send(pair.to_b, static_cast<std::size_t>(i)).code());
    (void)pair.b->send(pair.to_a, 10);
    pair.a->turn();
    pair.b->turn();
  }
  for (int i = 0; i < 100; ++i) {
    pair.a->turn();
    pair.b->turn();
  }
  for (const End* end : pair.all) {
    for (const Received& message : end->received) text += " " + std::to_string(message.number);
    for (EventKind kind : end->trace) text += " " + std::to_string(static_cast<int>(kind));
  }
  return text;
}

TEST(Faulty, TheSameSeedGivesTheSameFaults) {
  EXPECT_EQ(history(7), history(7));
  EXPECT_NE(history(7).substr(40), history(8).substr(40));
  EXPECT_EQ(history(7).rfind("faults of seed 7: refuse 10 %, delay 40 %, late 40 %, cut 20 in 1000, "
                             "down 3 in 1000, for up to 9 turns\n",
                             0),
            0u);
}

TEST(Faulty, MessagesOvertakeEachOther) {
  FaultRates rates;
  rates.delay_percent = 50;
  rates.max_turns = 10;
  Pair pair(test_seed(), rates);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(pair.a->send(pair.to_b, 10).ok());
    ASSERT_TRUE(pair.b->send(pair.to_a, 10).ok());
    pair.a->turn();
  }
  ASSERT_TRUE(
      run_until(pair.all, [&] { return pair.a->received.size() == 100 && pair.b->received.size() == 100; }));
  for (const End* end : pair.all) {
    EXPECT_FALSE(std::is_sorted(end->received.begin(), end->received.end(),
                                [](const Received& x, const Received& y) { return x.number < y.number; }));
  }
}

TEST(Faulty, CompletionsComeLate) {
  FaultRates rates;
  rates.late_percent = 100;
  rates.max_turns = 50;
  Pair pair(test_seed(), rates);
  ASSERT_TRUE(pair.a->send(pair.to_b, 10).ok());
  ASSERT_TRUE(pair.a->flush(pair.to_b).ok());
  int turns = 0;
  for (; pair.a->unsettled() != 0; ++turns) {
    pair.b->turn();
    EXPECT_FALSE(pair.a->transport().arm());  // what is held goes by turns
    pair.a->turn();
  }
  EXPECT_EQ(pair.b->received.size(), 1u);
  EXPECT_GT(turns, 1);
  EXPECT_LE(turns, 52);
}

TEST(Faulty, SendsAreRefused) {
  FaultRates rates;
  rates.refuse_percent = 50;
  Pair pair(3, rates);
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    const Status status = pair.a->send(pair.to_b, 10);
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), StatusCode::kWouldBlock);
    ++refused;
  }
  EXPECT_GT(refused, 60);
  EXPECT_LT(refused, 140);
  EXPECT_TRUE(run_until(pair.all, [&] { return pair.b->received.size() == 200u - refused; }));
}

TEST(Faulty, ACutHoldsBothWaysAndLosesNothing) {
  Pair pair(1, {});
  ASSERT_TRUE(pair.faulty->cut(pair.to_b, Cut::kBoth).ok());
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(pair.a->send(pair.to_b, 500).ok());
    ASSERT_TRUE(pair.b->send(pair.to_a, 500).ok());
  }
  ASSERT_TRUE(pair.a->flush(pair.to_b).ok());
  run_for(pair.all, 30);
  EXPECT_TRUE(pair.a->received.empty());
  EXPECT_TRUE(pair.b->received.empty());
  EXPECT_EQ(pair.a->unsettled(), 21u);
  EXPECT_TRUE(pair.a->transport().arm());  // a cut is silence: nothing to spin for
  ASSERT_TRUE(pair.faulty->mend(pair.to_b).ok());
  EXPECT_FALSE(pair.a->transport().arm());
  EXPECT_TRUE(run_until(pair.all, [&] {
    return pair.a->received.size() == 20 && pair.b->received.size() == 20 && pair.a->unsettled() == 0;
  }));
  EXPECT_EQ(pair.a->sent_aborted(), 0u);
}

TEST(Faulty, AOneWayCutOut) {
  Pair pair(1, {});
  ASSERT_TRUE(pair.faulty->cut(pair.to_b, Cut::kOutgoing).ok());
  ASSERT_TRUE(pair.a->send(pair.to_b, 500).ok());
  ASSERT_TRUE(pair.b->send(pair.to_a, 500).ok());
  run_for(pair.all, 30);
  EXPECT_EQ(pair.a->received.size(), 1u);
  EXPECT_TRUE(pair.b->received.empty());
  EXPECT_EQ(pair.a->unsettled(), 1u);
  EXPECT_EQ(pair.b->unsettled(), 0u);
  ASSERT_TRUE(pair.a->close(pair.to_b).ok());
  EXPECT_TRUE(run_until(pair.all, [&] { return pair.a->unsettled() == 0; }));
  EXPECT_EQ(pair.a->sent_aborted(), 1u);
  EXPECT_TRUE(pair.b->received.empty());
}

TEST(Faulty, AOneWayCutInHoldsTheEndOfThePeer) {
  Pair pair(1, {});
  ASSERT_TRUE(pair.faulty->cut(pair.to_b, Cut::kIncoming).ok());
  ASSERT_TRUE(pair.a->send(pair.to_b, 500).ok());
  ASSERT_TRUE(pair.b->send(pair.to_a, 500).ok());
  run_for(pair.all, 30);
  EXPECT_TRUE(pair.a->received.empty());
  EXPECT_EQ(pair.b->received.size(), 1u);
  pair.b->end();
  run_for({pair.a.get()}, 30);
  EXPECT_FALSE(pair.a->down(pair.to_b));
  ASSERT_TRUE(pair.faulty->mend(pair.to_b).ok());
  EXPECT_TRUE(run_until({pair.a.get()}, [&] { return pair.a->down(pair.to_b); }));
  EXPECT_EQ(pair.a->received.size(), 1u);  // it had come before
}

TEST(Faulty, APeerIsDropped) {
  Pair pair(1, {});
  ASSERT_TRUE(pair.faulty->cut(pair.to_b, Cut::kBoth).ok());
  ASSERT_TRUE(pair.a->send(pair.to_b, 500).ok());
  ASSERT_TRUE(pair.faulty->drop(pair.to_b).ok());
  EXPECT_EQ(pair.a->send(pair.to_b, 500).code(), StatusCode::kAborted);
  EXPECT_TRUE(run_until(pair.all, [&] { return pair.a->down(pair.to_b); }));
  EXPECT_EQ(pair.a->sent_aborted(), 1u);
  EXPECT_TRUE(pair.a->close(pair.to_b).ok());
  EXPECT_EQ(pair.faulty->drop(pair.to_b).code(), StatusCode::kNotFound);
  EXPECT_EQ(pair.faulty->cut(pair.to_b, Cut::kBoth).code(), StatusCode::kNotFound);
  EXPECT_EQ(pair.faulty->mend(pair.to_b).code(), StatusCode::kNotFound);
}

// Everything at once, peers that go down too: the ends hold it against the contract, and nothing stands
// still.
TEST(Faulty, AnythingAtRandomOverBoth) {
  const std::uint64_t seed = test_seed();
  for (Carrier carrier : {Carrier::kInProcess, Carrier::kUcx}) {
    std::mt19937_64 random(seed);
    FaultRates rates;
    rates.refuse_percent = 10;
    rates.delay_percent = 40;
    rates.late_percent = 40;
    rates.cut_per_mille = 20;
    rates.down_per_mille = 10;
    rates.max_turns = 30;
    World world({carrier, false}, seed);
    End a(make_faulty(world.open(), seed, rates), 1);
    End b(make_faulty(world.open(), seed + 1, rates), 2);
    for (int round = 0; round < 15; ++round) {
      SCOPED_TRACE(std::to_string(seed) + ", round " + std::to_string(round));
      const PeerId to_b = a.connect(b);
      const PeerId to_a = b.connect(a);
      for (int i = 0; i < 150; ++i) {
        (void)a.send(to_b, random() % 40000);
        (void)b.send(to_a, random() % 40000);
        if (random() % 5 == 0) (void)a.flush(to_b);
        if (random() % 2 == 0) (random() % 2 == 0 ? a : b).turn();
      }
      ASSERT_TRUE(run_until({&a, &b}, [&] { return a.unsettled() + b.unsettled() == 0; }));
      ASSERT_TRUE(a.close(to_b).ok());
      ASSERT_TRUE(b.close(to_a).ok());
      ASSERT_TRUE(run_until({&a, &b}, [&] { return a.unsettled() + b.unsettled() == 0; }));
    }
    EXPECT_GT(a.sent_ok(), 0u);
    EXPECT_GT(a.sent_aborted() + b.sent_aborted(), 0u);
  }
}

}  // namespace
}  // namespace epd::transport
