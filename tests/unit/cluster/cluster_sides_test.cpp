// Coordinator and agents in stepped time, over streams that the test carries, cuts and holds up.
#include "base/event.h"
#include "cluster_fixture.h"

namespace epd::cluster {
namespace {

TEST_F(ClusterSides, AllSeeAll) {
  AgentSide& b = agent("node-b", 'B');
  AgentSide& c = agent("node-c", 'C');
  step(200);
  for (const Side* side :
       {static_cast<Side*>(coordinator_.get()), static_cast<Side*>(&b), static_cast<Side*>(&c)}) {
    for (const char* node : {"node-a", "node-b", "node-c"})
      EXPECT_EQ(state(*side, node), NodeState::kUp) << node;
  }
  EXPECT_EQ(b.view().problem, "");
  step(60'000);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp) << "heartbeats";
  EXPECT_EQ(streams_.size(), 2u);
}

TEST_F(ClusterSides, SilenceIsSilentThenLost) {
  AgentSide& b = agent("node-b", 'B');
  agent("node-c", 'C');
  step(200);
  streams_[0].held_up = true;
  step(kTimeoutMs / 2 + 100);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent);
  EXPECT_EQ(state(b, "node-a"), NodeState::kSilent);
  EXPECT_EQ(state(*agents_["node-c"], "node-b"), NodeState::kSilent) << "it is told";
  step(kTimeoutMs / 2 - 300);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent) << "not yet";
  // From here on every stream of b is held up as it opens.
  for (int i = 0; i < 40; ++i) {
    clock_.advance_ms(25);
    coordinator_->tick();
    agents_["node-c"]->tick();
    settle();
  }
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kLost);
  EXPECT_EQ(state(*agents_["node-c"], "node-b"), NodeState::kLost);
  step(3'000);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp) << "another stream";
}

TEST_F(ClusterSides, AStreamThatBreaksCostsNothing) {
  AgentSide& b = agent("node-b", 'B');
  step(200);
  cut();
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent);
  ASSERT_EQ(probes_.size(), 1u);
  EXPECT_EQ(probes_[0].first, "127.0.0.1:1");
  probes_[0].second(false);  // somebody listens
  b.drain();                 // said while there is no stream
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent);
  step(300);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kDraining);
  EXPECT_EQ(state(b, "node-a"), NodeState::kUp);
  const View view = coordinator_->view();
  EXPECT_EQ(find(view, "node-b")->boot_id[0], 'B');
}

// gRPC's words of one cause are not the same each time, and name no host.
TEST_F(ClusterSides, OneCauseIsOneProblemInWordsThatNameTheHost) {
  AgentSide& b = agent("node-b", 'B');
  const auto problem_after = [&](const std::string& why) {
    b.tick();
    end(*streams_.back().agent, why);
    clock_.advance_ms(2'000);
    return b.view().problem;
  };
  const auto unresolved = [&](const std::string& kind, const std::string& why) {
    return problem_after("DNS resolution failed for node-a:1: C-ares status is not ARES_SUCCESS qtype=" +
                         kind + " name=node-a is_balancer=0: " + why);
  };
  const std::string problem =
      "the host \"node-a\" of cluster.coordinator can't be resolved: Domain name not found";
  EXPECT_EQ(unresolved("A", "Domain name not found"), problem);
  EXPECT_EQ(unresolved("AAAA", "DNS server returned answer with no data"), problem);
  const std::string verified = problem_after(
      "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: Hostname Verification Check "
      "failed.");
  EXPECT_NE(verified.find("cluster.coordinator = \"node-a:1\" does not name \"node-a\""), std::string::npos)
      << verified;
  EXPECT_EQ(unresolved("A", "Domain name not found"), problem) << "another cause again";
}

TEST_F(ClusterSides, NobodyListensAnyMore) {
  agent("node-b", 'B');
  step(200);
  agents_.clear();
  streams_[0].coordinator->finished_ = true;
  coordinator_->on_closed(*streams_[0].coordinator, {StatusCode::kAborted, "reset"});
  probes_.at(0).second(true);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kLost);
  // The same daemon's name with another boot id.
  agent("node-b", 'D');
  step(200);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  const View view = coordinator_->view();
  EXPECT_EQ(find(view, "node-b")->boot_id[0], 'D');
  // An answer about the one before says nothing of it. It is looked for as long as it is gone.
  cut();
  ASSERT_EQ(probes_.size(), 2u);
  probes_[0].second(true);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent);
  agents_.clear();
  step(500);
  EXPECT_EQ(probes_.size(), 4u);
  probes_[3].second(true);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kLost);
}

TEST_F(ClusterSides, ANewCoordinatorTakesAHigherTerm) {
  AgentSide& b = agent("node-b", 'B');
  AgentSide& c = agent("node-c", 'C');
  step(200);
  EXPECT_EQ(b.view().term, 1u);
  cut("Connection refused");
  EXPECT_EQ(state(b, "node-a"), NodeState::kLost);
  restart_coordinator('E');
  step(2'000);
  EXPECT_EQ(coordinator_->view().term, 2u);
  EXPECT_EQ(b.view().term, 2u);
  EXPECT_EQ(c.view().term, 2u);
  EXPECT_EQ(state(b, "node-c"), NodeState::kUp);
}

TEST_F(ClusterSides, LeavingIsSaid) {
  AgentSide& b = agent("node-b", 'B');
  step(200);
  b.leave();
  tick();
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kLost);
  const View view = coordinator_->view();
  EXPECT_EQ(find(view, "node-b")->reason, "its daemon has stopped");
}

TEST_F(ClusterSides, HelloIsJudged) {
  const auto refused = [&](auto change, PeerFacts peer, const std::string& text) {
    const auto stream = open_raw(std::move(peer));
    v1::Frame frame = hello("node-x", 'X');
    change(*frame.mutable_hello());
    say(*stream, frame);
    EXPECT_TRUE(stream->finished_) << text;
    EXPECT_NE(stream->status_.message().find(text), std::string::npos) << stream->status_.message();
    EXPECT_EQ(coordinator_->view().nodes.size(), 1u) << "nobody came in";
  };
  const PeerFacts plain{"10.0.0.9:9", false, {}};
  refused([](v1::Hello& h) { h.mutable_node()->set_name("a b"); }, plain, "the node's name is none");
  refused([](v1::Hello& h) { h.mutable_node()->set_boot_id("x"); }, plain, "has 1 bytes; allowed: 16");
  refused([](v1::Hello& h) { h.mutable_node()->set_address("nowhere"); }, plain, "allowed: HOST:PORT");
  refused([](v1::Hello& h) { h.mutable_node()->set_daemon_version("\n"); }, plain, "no printable text");
  refused([](v1::Hello& h) { h.set_version_min(4); }, plain, "it speaks versions 4..4, this daemon 3..3");
  refused([](v1::Hello& h) { h.set_version_max(2); }, plain, "it speaks versions 2..2, this daemon 3..3");
  refused([](v1::Hello& h) { h.set_version_max(0); }, plain, "it speaks versions 2..0");
  refused([](v1::Hello& h) { h.set_cluster("prod"); }, plain, "its cluster.name is \"prod\"");
  refused([](v1::Hello& h) { h.mutable_node()->set_name("rack-1"); }, plain,
          "is not allowed; cluster.nodes of node-a is node-*");
  refused([](v1::Hello& h) { h.mutable_node()->set_name("NODE-A"); }, plain,
          "another daemon is node node-a already");
  refused([](v1::Hello& h) { h.mutable_node()->set_address("node-a:1"); }, plain,
          "its cluster.advertise is \"node-a:1\", where node node-a is reached");
  refused([](v1::Hello&) {}, {"10.0.0.9:9", true, {"node-y", "*.x"}},
          "its certificate does not name; allowed: node-y, *.x");
  EXPECT_EQ(refusals_.counts().size(), 5u);
  const auto good = open_raw({"10.0.0.9:9", true, {"NODE-X"}});
  say(*good, hello("node-x", 'X'));
  EXPECT_FALSE(good->finished_);
  EXPECT_EQ(good->out_.front().welcome().version(), 3u);
}

// A copied configuration. Its engines would be looked for at the other node.
TEST_F(ClusterSides, AnAddressBelongsToOneNode) {
  AgentSide& b = agent("node-b", 'B');
  step(200);
  v1::Frame frame = hello("node-x", 'X');
  frame.mutable_hello()->mutable_node()->set_address("node-b:1");
  const auto copy = open_raw();
  say(*copy, frame);
  EXPECT_TRUE(copy->finished_);
  EXPECT_NE(copy->status_.message().find("\"node-b:1\", where node node-b is reached"), std::string::npos)
      << copy->status_.message();
  b.leave();  // it is renamed: its address is free
  tick();
  const auto renamed = open_raw();
  say(*renamed, frame);
  EXPECT_FALSE(renamed->finished_) << renamed->status_.message();
}

// A node took another one's address while that one was away, and kept it out.
TEST_F(ClusterSides, AnAddressBelongsToTheNodeWhoseCertificateNamesIt) {
  struct {
    const char* address;
    PeerFacts holder, newcomer;
    bool is_newcomers;
  } const cases[] = {
      {"10.0.0.3:7",
       {"10.0.0.5:9", true, {"node-e"}, {}},
       {"10.0.0.5:8", true, {"node-c"}, {"10.0.0.3"}},
       true},
      {"node-c:7", {"10.0.0.5:9", true, {"node-e"}, {}}, {"10.0.0.5:8", true, {"NODE-C"}, {}}, true},
      {"10.0.0.3:7", {"10.0.0.5:9", true, {"node-e"}, {}}, {"10.0.0.3:8", true, {"node-c"}, {}}, true},
      {"10.0.0.3:7",
       {"10.0.0.5:9", true, {"node-e"}, {"10.0.0.3"}},
       {"10.0.0.3:8", true, {"node-c"}, {}},
       false},
      {"10.0.0.3:7", {"10.0.0.3:9", true, {"node-e"}, {}}, {"10.0.0.3:8", true, {"node-c"}, {}}, false},
      {"10.0.0.4:7", {"10.0.0.5:9", true, {"node-e"}, {}}, {"10.0.0.3:8", true, {"node-c"}, {}}, false},
  };
  char boot = 'b';
  for (const auto& one : cases) {
    SCOPED_TRACE(boot);
    v1::Frame frame = hello("node-e", boot++);
    frame.mutable_hello()->mutable_node()->set_address(one.address);
    const auto holder = open_raw(one.holder);
    say(*holder, frame);
    EXPECT_FALSE(holder->finished_) << holder->status_.message();
    frame.mutable_hello()->mutable_node()->set_name("node-c");
    const auto newcomer = open_raw(one.newcomer);
    say(*newcomer, frame);
    EXPECT_EQ(holder->finished_, one.is_newcomers) << holder->status_.message();
    EXPECT_EQ(newcomer->finished_, !one.is_newcomers) << newcomer->status_.message();
    for (const auto& stream : {holder, newcomer}) end(*stream, "over");
    step(kTimeoutMs + 100);
  }
}

TEST_F(ClusterSides, WhoSaysNoHelloIsSentAway) {
  const auto stream = open_raw();
  step(4'900);
  EXPECT_FALSE(stream->finished_);
  step(200);
  EXPECT_TRUE(stream->finished_);
}

// One certificate held all places, and opened its streams again as soon as they were refused.
TEST_F(ClusterSides, NewcomersOfOneCertificateLeaveRoomForOthers) {
  EventLog log;
  log.install();
  const PeerFacts honest{"10.0.0.3:9", true, {"node-x"}};
  const PeerFacts other{"10.0.0.9:9", true, {"node-y", "node-z"}};
  const auto first = open_raw(honest);
  std::vector<std::shared_ptr<FakeStream>> many;
  for (int i = 0; i < 200; ++i) {
    clock_.advance_ms(1);
    many.push_back(open_raw(other));
  }
  for (std::size_t i = 0; i < many.size(); ++i)
    EXPECT_EQ(many[i]->finished_, i < many.size() - 63) << i << ": the oldest make room";
  const auto second = open_raw(honest);
  EXPECT_TRUE(many[many.size() - 63]->finished_);
  for (const auto& stream : {first, second}) EXPECT_FALSE(stream->finished_);
  say(*first, hello("node-x", 'X'));
  EXPECT_FALSE(first->finished_) << first->status_.message();
  EXPECT_EQ(many[0]->status_.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(many[0]->status_.message(),
            "too many streams that have not said Hello: 63 of 64 are of the certificate of node-y, node-z, "
            "whose oldest makes room for another");
  const EventBatch batch = log.read(0, 1, 0);
  ASSERT_FALSE(batch.events.empty());
  const auto& fields = batch.events.front().fields;
  EXPECT_NE(std::find(fields.begin(), fields.end(),
                      std::pair<std::string, std::string>("reason", many[0]->status_.message())),
            fields.end());
}

TEST_F(ClusterSides, TooManyNodes) {
  for (std::size_t i = 0; i < kMaxNodes; ++i) say(*open_raw(), hello("node-" + std::to_string(i), 'X'));
  const auto stream = open_raw();
  say(*stream, hello("node-more", 'X'));
  EXPECT_EQ(stream->status_.code(), StatusCode::kResourceExhausted);
  step(kTimeoutMs + 100);  // all are lost, so the one that was lost first makes room
  const auto later = open_raw();
  say(*later, hello("node-more", 'X'));
  EXPECT_FALSE(later->finished_);
}

TEST_F(ClusterSides, AnIllegalMessageEndsItsStreamAlone) {
  AgentSide& b = agent("node-b", 'B');
  step(200);
  const auto raw = open_raw();
  say(*raw, hello("node-x", 'X'));
  say(*raw, hello("node-x", 'X'));
  EXPECT_TRUE(raw->finished_);
  EXPECT_EQ(state(*coordinator_, "node-x"), NodeState::kSilent);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  EXPECT_EQ(b.view().problem, "");
}

// A node is replaced by itself alone while its stream is open, and nobody can guess its channel.
TEST_F(ClusterSides, ATakeoverIsRefused) {
  agent("node-b", 'B');
  step(200);
  const auto refused = [&](char boot, std::uint64_t channel) {
    const auto raw = open_raw();
    v1::Frame frame = hello("node-b", boot);
    frame.mutable_hello()->set_coordinator_boot_id(std::string(16, 'A'));
    frame.mutable_hello()->set_channel(channel);
    say(*raw, frame);
    EXPECT_EQ(raw->status_.message(), "another daemon is node node-b already");
  };
  refused('X', 0);
  for (std::uint64_t channel = 0; channel < 5; ++channel) refused('B', channel);  // the table tells boot ids
  streams_[0].held_up = true;
  step(kTimeoutMs / 2 + 100);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kSilent);
  refused('X', 0);
  streams_[0].held_up = false;
  step(200);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  EXPECT_EQ(streams_.size(), 1u) << "its own stream has gone on";
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"nodes", 7}}));
}

// The daemon itself, whose connection has died on its way while the coordinator still has it.
TEST_F(ClusterSides, ANodeReplacesItsOwnStream) {
  agent("node-b", 'B');
  step(200);
  streams_[0].held_up = true;
  end(*streams_[0].agent, "reset");
  step(300);
  EXPECT_EQ(streams_.size(), 2u);
  EXPECT_TRUE(streams_[0].coordinator->finished_);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  EXPECT_TRUE(refusals_.counts().empty());
}

// However often states change, the table goes out once per heartbeat.
TEST_F(ClusterSides, TheTableIsPaced) {
  const auto raw = open_raw();
  say(*raw, hello("node-x", 'X'));
  std::size_t tables = 0;
  const auto drain = [&] {
    while (!raw->out_.empty()) {
      if (raw->out_.front().has_message()) {
        v1::NodeMessage content;
        ASSERT_TRUE(content.ParseFromString(raw->out_.front().message().payload()));
        tables += content.has_table();
      }
      raw->out_.pop_front();
      raw->writing_ = false;
      raw->events_.on_written(*raw);
    }
  };
  drain();
  for (int i = 0; i < 50; ++i) {
    say(*open_raw(), hello("node-" + std::to_string(i), 'X'));
    clock_.advance_ms(10);
    coordinator_->tick();
    drain();
  }
  EXPECT_GE(tables, 4u);
  EXPECT_LE(tables, 6u) << "in 500 ms";
}

// Welcome may come before gRPC says that Hello has left.
TEST_F(ClusterSides, NothingIsWrittenWhileHelloLeaves) {
  AgentSide& b = agent("node-b", 'B');
  b.tick();
  FakeStream& stream = *streams_.at(0).agent;
  ASSERT_TRUE(stream.writing_);
  ASSERT_TRUE(carry_frame(stream, *streams_[0].coordinator));
  ASSERT_TRUE(carry_frame(*streams_[0].coordinator, stream));
  EXPECT_TRUE(stream.writing_) << "Hello";
  b.drain();
  b.tick();  // the stream would say that a second frame is written
  EXPECT_TRUE(stream.out_.empty());
  stream.writing_ = false;
  b.on_written(stream);
  EXPECT_TRUE(stream.writing_);
  ASSERT_EQ(stream.out_.size(), 1u);
  EXPECT_TRUE(stream.out_[0].has_message());
}

}  // namespace
}  // namespace epd::cluster
