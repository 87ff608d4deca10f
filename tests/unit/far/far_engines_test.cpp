// Engines of several nodes that share a group: hellos, operations, breaks, losses, restarts. A failure prints
// its case; EPD_TEST_SEED=N gives other cases.
#include "engine_nodes.h"
#include "wrapped_transport.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>

namespace epd::test {
namespace {

using abi::LinkType;

std::uint64_t base_seed() {
  const char* seed = std::getenv("EPD_TEST_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}

std::mt19937 random_of(std::uint64_t test, std::uint64_t number) {
  return std::mt19937(static_cast<std::uint32_t>(base_seed() * 7919 + test * 104729 + number));
}

Case far_case(std::mt19937& random, std::uint32_t ranks) {
  Case c = random_case(random(), ranks);
  c.defer = false;
  add_formats(c);
  return c;
}

Case plain_case(std::uint32_t ranks) {
  Case c;
  c.num_ranks = ranks;
  c.num_experts = 2 * ranks;
  return c;
}

using Numbers = std::vector<std::uint32_t>;

EngineNodesOptions places(Numbers nodes, Numbers devices) {
  EngineNodesOptions options;
  options.nodes = std::move(nodes);
  options.devices = std::move(devices);
  options.window_bytes = 1 << 20;
  return options;
}

// One engine on each node.
EngineNodesOptions two_nodes() {
  return places({1, 1, 2, 2}, {0, 0, 0, 0});
}

const std::vector<std::pair<Numbers, Numbers>> kPlaces = {{{1, 1, 2, 2}, {0, 0, 0, 0}},
                                                          {{1, 2, 2, 1}, {0, 0, 1, 1}},
                                                          {{1, 2, 3, 3}, {0, 0, 0, 1}},
                                                          {{3, 3, 3, 7}, {0, 1, 0, 0}}};

// Half of them on a transport on which messages are late, in another order, and refused.
EngineNodesOptions random_places(std::mt19937& random) {
  const auto& [nodes, devices] = kPlaces[random() % kPlaces.size()];
  EngineNodesOptions options = places(nodes, devices);
  constexpr std::uint64_t kBatches[] = {1024, 4096, 65536};
  options.batch_bytes = kBatches[random() % 3];
  if (random() % 2 == 0) options.faults = transport::FaultRates{10, 30, 30, 5, 0, 40};
  return options;
}

std::string text_of(const std::optional<Packet>& packet) {
  return packet ? packet->read<abi::PeerLost>().value().text : "nothing";
}

TEST(FarEngines, RandomOperationsAreAsSpecified) {
  for (std::uint64_t i = 0; i < 24; ++i) {
    std::mt19937 random = random_of(1, i);
    const Case c = far_case(random, 4);
    EngineNodes nodes(c, random_places(random));
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    ASSERT_EQ(nodes.run(random_steps(c, 12, random)), "") << nodes.describe();
    ASSERT_EQ(nodes.remove(), "") << nodes.describe();
  }
}

// Some ranks have begun what others have not.
TEST(FarEngines, ABrokenGroupGoesOnInTheNextEpoch) {
  for (std::uint64_t i = 0; i < 8; ++i) {
    std::mt19937 random = random_of(2, i);
    const Case c = far_case(random, 4);
    EngineNodes nodes(c, random_places(random));
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    const std::vector<FarStep> steps = random_steps(c, 12, random);
    for (std::size_t done = 3; done < 12; done += 3) {
      ASSERT_EQ(nodes.run(steps, done), "") << nodes.describe();
      for (std::uint32_t rank = 0; rank < 4; ++rank) {
        if (random() % 2 == 0) nodes.call(rank, steps[done]);
      }
      ASSERT_EQ(nodes.break_and_resume(), "") << nodes.describe();
    }
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
  }
}

// Operations are numbered near the place where tags begin again (proto/README, "Numbers that wrap"). After
// the second break they are counted from another base than those that made the routings.
TEST(FarEngines, OperationsGoOnWhereTagsBeginAnew) {
  for (std::uint64_t i = 0; i < 8; ++i) {
    std::mt19937 random = random_of(7, i);
    const Case c = far_case(random, 4);
    EngineNodesOptions options = random_places(random);
    options.first_op = (1 + i % 3) * abi::kTagRound - 5;
    EngineNodes nodes(c, options);
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    const std::vector<FarStep> steps = random_steps(c, 16, random);
    for (const std::size_t done : {4, 8}) {
      ASSERT_EQ(nodes.run(steps, done), "") << nodes.describe();
      ASSERT_EQ(nodes.break_and_resume(), "") << nodes.describe();
    }
    nodes.stop(1);
    ASSERT_EQ(nodes.break_all({1}), "");
    nodes.restart(1);
    ASSERT_EQ(nodes.expect_ready(1), "") << nodes.describe();
    nodes.take_next_index(8);
    nodes.resume();
    ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
  }
}

TEST(FarEngines, ARankGoesAndAnotherComesInItsPlace) {
  for (std::uint64_t i = 0; i < 8; ++i) {
    std::mt19937 random = random_of(3, i);
    Case c = far_case(random, 4);
    c.degrade = true;
    // Each engine keeps a rank.
    EngineNodes nodes(c, i % 2 == 0 ? two_nodes() : places({1, 2, 2, 1}, {0, 0, 0, 0}));
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    const auto rank = static_cast<std::uint32_t>(random() % 4);
    // Each part makes its own routings: those of before are of another group.
    std::vector<FarStep> steps = random_steps(c, 4, random);
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    ASSERT_EQ(nodes.break_all(), "");
    nodes.mask(rank);
    nodes.resume();
    ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
    for (const FarStep& step : random_steps(c, 6, random)) steps.push_back(step);
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    ASSERT_EQ(nodes.break_all(), "");
    nodes.admit(rank);
    nodes.resume();
    ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
    for (const FarStep& step : random_steps(c, 6, random)) steps.push_back(step);
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
  }
}

// Each combine is without the rows and the tokens of all that were replaced before it.
TEST(FarEngines, RanksAreReplacedElsewhereAndOlderRoutingsAreCombined) {
  for (std::uint64_t i = 0; i < 12; ++i) {
    std::mt19937 random = random_of(8, i);
    Case c = far_case(random, 5);
    c.degrade = true;
    // Each engine keeps a rank.
    EngineNodes nodes(c, places({1, 1, 2, 2, 3}, {0, 0, 0, 0, 0}));
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    std::vector<FarStep> steps;
    const auto add = [&](bool dispatch) {
      for (std::uint32_t slot = 0; slot < c.depth; ++slot)
        steps.push_back({dispatch, false, slot, slot, Round(slot)});
    };
    add(true);
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    add(false);
    for (std::uint32_t rank = 0; rank < 5; ++rank) {
      if (random() % 2 == 0) nodes.call(rank, steps[c.depth]);
    }
    const std::uint32_t first = i % 2 == 0 ? 0 : 2;
    for (const std::uint32_t rank : {first, 2 - first}) {
      ASSERT_EQ(nodes.break_all(), "");
      nodes.mask(rank);
      nodes.resume();
      ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
      if (random() % 2 == 0) {
        ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
        add(false);
      }
      ASSERT_EQ(nodes.break_all(), "");
      if (random() % 4 != 0) nodes.move(rank, nodes.engine_of((rank + 2) % 5));
      nodes.admit(rank);
      nodes.resume();
      ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
      if (random() % 2 == 0) {
        ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
        add(false);
      }
    }
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
    for (const FarStep& step : random_steps(c, 6, random)) steps.push_back(step);
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
  }
}

TEST(FarEngines, ARestartedEngineGoesOnWithAnotherAddress) {
  for (std::uint64_t i = 0; i < 6; ++i) {
    std::mt19937 random = random_of(4, i);
    const Case c = far_case(random, 4);
    EngineNodes nodes(c, random_places(random));
    nodes.begin();
    ASSERT_EQ(nodes.expect_ready(), "") << nodes.describe();
    const std::vector<FarStep> steps = random_steps(c, 10, random);
    ASSERT_EQ(nodes.run(steps, 5), "") << nodes.describe();
    const std::size_t which = random() % nodes.num_engines();
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      if (random() % 2 == 0) nodes.call(rank, steps[5]);
    }
    nodes.stop(which);
    ASSERT_EQ(nodes.break_all({which}), "") << nodes.describe();
    nodes.restart(which);
    ASSERT_EQ(nodes.expect_ready(which), "") << nodes.describe();
    nodes.take_next_index(5);
    nodes.resume();
    ASSERT_EQ(nodes.expect_resumed(), "") << nodes.describe();
    ASSERT_EQ(nodes.run(steps), "") << nodes.describe();
  }
}

// Engine 0 begins long before engine 1.
TEST(FarEngines, AGroupWaitsForEachHello) {
  EngineNodes nodes(plain_case(4), two_nodes());
  nodes.begin(1);
  const auto waits = nodes.engine(0).expect(LinkType::kGroupWaits);
  ASSERT_TRUE(waits.has_value());
  EXPECT_STREQ(waits->read<abi::GroupWaits>().value().text, "greeting of host:0 on node-2");
  // A call that a client makes too early also waits.
  nodes.call(0, FarStep{});
  EXPECT_FALSE(nodes.engine(0).expect(LinkType::kGroupReady, 200).has_value());
  nodes.begin_engine(1, false);
  EXPECT_EQ(nodes.expect_ready(), "");
  EXPECT_EQ(nodes.run({FarStep{}}), "");
}

TEST(FarEngines, AnEngineThatSaysNoHelloIsLostForTheGroup) {
  EngineNodesOptions options = two_nodes();
  options.peer_timeout_ms = 300;
  EngineNodes nodes(plain_case(4), options);
  nodes.begin(1);
  for (int again = 0; again < 2; ++again) {
    const auto lost = nodes.engine(0).expect(LinkType::kPeerLost);
    ASSERT_TRUE(lost.has_value());
    const auto body = lost->read<abi::PeerLost>().value();
    EXPECT_EQ(body.node, 2u);
    EXPECT_EQ(body.device_index, 0u);
    EXPECT_STREQ(body.text, "host:0 on node-2 has said nothing for 300 ms");
  }
  nodes.begin_engine(1, false);
  EXPECT_EQ(nodes.expect_ready(), "");
}

TEST(FarEngines, ADifferentViewIsRefusedByName) {
  EngineNodes nodes(plain_case(4), two_nodes());
  nodes.set_view(1, 99);
  nodes.begin();
  EXPECT_EQ(nodes.expect_ready(0),
            "INVALID_ARGUMENT: host:0 on node-2 has another view: which ranks take part, and where");
  EXPECT_EQ(nodes.expect_ready(1),
            "INVALID_ARGUMENT: host:0 on node-1 has another view: which ranks take part, and where");
  EXPECT_EQ(nodes.remove(), "");
}

TEST(FarEngines, ADifferentViewAtAResumeIsALostPeer) {
  EngineNodes nodes(plain_case(4), two_nodes());
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  ASSERT_EQ(nodes.break_all(), "");
  nodes.set_view(1, 99);
  nodes.resume();
  EXPECT_EQ(text_of(nodes.engine(0).expect(LinkType::kPeerLost)),
            "host:0 on node-2 has another view: which ranks take part, and where");
  EXPECT_FALSE(nodes.engine(0).expect(LinkType::kResumed, 100).has_value());
  ASSERT_EQ(nodes.break_all(), "");
  nodes.set_view(1, 3);
  nodes.resume();
  EXPECT_EQ(nodes.expect_resumed(), "");
}

// Nothing comes to it for a while.
class Deaf final : public WrappedTransport {
 public:
  Deaf(std::unique_ptr<transport::Transport> inner, std::atomic<bool>& deaf)
      : WrappedTransport(std::move(inner)), deaf_(deaf) {}
  std::size_t progress(std::span<transport::Event> events) override {
    return deaf_ ? 0 : inner().progress(events);
  }

 private:
  std::atomic<bool>& deaf_;
};

TEST(FarEngines, AnEngineThatFallsSilentIsLostAndComesBack) {
  transport::Network network;
  std::atomic<bool> deaf{false};
  std::atomic<int> opened{0};
  EngineNodesOptions options = two_nodes();
  options.peer_timeout_ms = 2000;
  options.open = [&](const transport::Limits& limits) -> Result<std::unique_ptr<transport::Transport>> {
    auto inner = network.open(limits);
    if (!inner.ok() || ++opened != 2) return inner;
    return std::unique_ptr<transport::Transport>(std::make_unique<Deaf>(std::move(inner).value(), deaf));
  };
  const Case c = plain_case(4);
  EngineNodes nodes(c, options);
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  std::mt19937 random = random_of(5, 0);
  const std::vector<FarStep> steps = random_steps(c, 6, random);
  ASSERT_EQ(nodes.run(steps, 3), "");
  // Nobody is lost while all are idle and well. Engine 0 still hears the other's pings.
  EXPECT_FALSE(nodes.engine(0).expect(LinkType::kPeerLost, 2500).has_value());
  deaf = true;
  EXPECT_EQ(text_of(nodes.engine(1).expect(LinkType::kPeerLost)),
            "host:0 on node-1 has said nothing for 2000 ms");
  deaf = false;
  ASSERT_EQ(nodes.break_and_resume(), "");
  EXPECT_EQ(nodes.run(steps), "");
}

TEST(FarEngines, AnEngineThatEndsIsLostAtOnce) {
  EngineNodes nodes(plain_case(4), two_nodes());
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  nodes.stop(1);
  const std::string text = text_of(nodes.engine(0).expect(LinkType::kPeerLost));
  EXPECT_EQ(text.find("host:0 on node-2 can't be reached: "), 0u) << text;
}

TEST(FarEngines, AnEngineThatIsDownIsLostWhileItIsNeeded) {
  EngineNodesOptions options = two_nodes();
  options.peer_timeout_ms = 1000;
  EngineNodes nodes(plain_case(4), options);
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  nodes.tell_address(0, 1, true);
  EXPECT_EQ(text_of(nodes.engine(0).expect(LinkType::kPeerLost)),
            "host:0 on node-2 has said nothing for 1000 ms: it is down");
  nodes.tell_address(0, 1);
  ASSERT_EQ(nodes.break_and_resume(), "");
  EXPECT_EQ(nodes.run({FarStep{}}), "");
  ASSERT_EQ(nodes.remove(), "");
  // No group needs it any more.
  nodes.stop(1);
  EXPECT_FALSE(nodes.engine(0).expect(LinkType::kPeerLost, 500).has_value());
}

TEST(FarEngines, AnOperationThatIsLateNamesWhomItWaitsFor) {
  const Case c = plain_case(4);
  EngineNodes nodes(c, two_nodes());
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  // Rank 1 is rank 3's gateway.
  nodes.call(0, FarStep{}, 10'000);
  nodes.call(1, FarStep{}, 300);
  nodes.call(2, FarStep{}, 10'000);
  const auto asked = nodes.engine(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(asked.has_value());
  const auto body = asked->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.failed_rank, 3);
  const std::string text = body.text;
  EXPECT_NE(text.find("rank 3 on node-2 has not got as far"), std::string::npos) << text;
  EXPECT_NE(text.find("it waited for the announcement of rank 3 on node-2"), std::string::npos) << text;
  ASSERT_EQ(nodes.break_and_resume(), "");
  EXPECT_EQ(nodes.run({FarStep{}}), "");
}

TEST(FarEngines, MemoryIsPromisedAtTheStart) {
  EngineNodesOptions options = two_nodes();
  options.max_bytes = 100'000;
  EngineNodes nodes(plain_case(4), options);
  nodes.begin();
  // Two ranks, each with one gateway and gateway for one, four windows of 1 MiB.
  EXPECT_EQ(nodes.expect_ready(0),
            "RESOURCE_EXHAUSTED: network.max_bytes is 100000; allowed: at least 8388608 for windows and "
            "send buffers of this engine's groups, this one included");
  // The client may do anything now.
  nodes.call(0, FarStep{});
  const auto end = nodes.wait(0, 100);
  EXPECT_TRUE(!end || end->ending != abi::CallEnding::kCarriedOut);
  EXPECT_EQ(nodes.remove(), "");
}

TEST(FarEngines, AWindowHasRoomForTwoTokens) {
  EngineNodesOptions options = two_nodes();
  options.batch_bytes = options.window_bytes = 1000;
  EngineNodes nodes(plain_case(4), options);
  nodes.begin();
  EXPECT_EQ(
      nodes.expect_ready(0).find("RESOURCE_EXHAUSTED: network.window_bytes is 1000; allowed: at least "), 0u);
  EXPECT_EQ(nodes.remove(), "");
}

TEST(FarEngines, AnEngineWithoutNetworkSaysSo) {
  EngineNodesOptions options = two_nodes();
  options.open = [](const transport::Limits&) -> Result<std::unique_ptr<transport::Transport>> {
    return not_found("no libucp in this test");
  };
  EngineNodes nodes(plain_case(4), options);
  EXPECT_TRUE(nodes.engine(0).address().empty());
  nodes.begin();
  EXPECT_EQ(nodes.expect_ready(0), "NOT_FOUND: no libucp in this test");
  const Mapping page =
      Mapping::map(nodes.engine(0).page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  EXPECT_EQ(page.as<abi::EnginePage>()->far.problem.load(), "no libucp in this test");
  EXPECT_EQ(nodes.remove(), "");
}

// Its successor was started while the node had no network. The group's end, or that of its ranks here, is
// nothing that it may not hear of.
TEST(FarEngines, ARestartedEngineWithoutNetworkHearsOfTheEnd) {
  EngineNodesOptions options = two_nodes();
  options.open = [](const transport::Limits&) -> Result<std::unique_ptr<transport::Transport>> {
    return not_found("no network in this test");
  };
  for (const bool fatal : {true, false}) {
    EngineNodes nodes(plain_case(4), options);
    EngineThread& engine = nodes.engine(0);
    nodes.begin_engine(0, true);
    EXPECT_EQ(nodes.expect_ready(0), "NOT_FOUND: no network in this test");
    if (fatal) {
      engine.send(LinkType::kBreak,
                  abi::Break{EngineNodes::kGroup, 1, 0, 1, StatusCode::kRankLost, 0, "a test"});
      ASSERT_TRUE(engine.expect(LinkType::kBroken).has_value());
    } else {
      engine.send(LinkType::kStopMember, abi::MemberRef{EngineNodes::kGroup, 0, 0, 0});
      ASSERT_TRUE(engine.expect(LinkType::kMemberStopped).has_value());
    }
    engine.send(LinkType::kRemoveGroup, abi::GroupRef{EngineNodes::kGroup});
    ASSERT_TRUE(engine.expect(LinkType::kGroupRemoved).has_value());
  }
}

// A group of one node on an engine whose other group breaks, loses its peer, and goes.
TEST(FarEngines, AGroupOfOneNodeIsNotTouched) {
  const Case c = plain_case(4);
  EngineNodes nodes(c, two_nodes());
  nodes.begin();
  ASSERT_EQ(nodes.expect_ready(), "");
  RawSession session(10);
  session.add_to(nodes.engine(0));
  const abi::GroupShape shape{1, 2, 8, 128, 1, 1, {}, {}, {}};
  RawGroup near(9, shape);
  near.add_to({&nodes.engine(0)}, {&session});
  Ringer ringer = near.host_ringer(0, session);
  const auto works = [&] { return ringer.ends_well(ringer.ring(dispatch_on(0), 0, 1)); };
  EXPECT_TRUE(works());
  ASSERT_EQ(nodes.break_all(), "");
  EXPECT_TRUE(works());
  nodes.resume({1});  // and nobody says hello
  EXPECT_TRUE(works());
  nodes.resume_engine(1);
  ASSERT_EQ(nodes.expect_resumed(), "");
  EXPECT_TRUE(works());
  nodes.stop(1);
  ASSERT_TRUE(nodes.engine(0).expect(LinkType::kPeerLost).has_value());
  EXPECT_TRUE(works());
  nodes.engine(0).send(LinkType::kRemoveGroup, abi::GroupRef{EngineNodes::kGroup});
  ASSERT_TRUE(nodes.engine(0).expect(LinkType::kGroupRemoved).has_value());
  EXPECT_TRUE(works());
}

}  // namespace
}  // namespace epd::test
