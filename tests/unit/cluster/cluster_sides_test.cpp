// Coordinator and agents in stepped time, over streams that the test carries, cuts and holds up.
#include "agent_side.h"
#include "base/clock.h"
#include "coordinator_side.h"
#include "frames.h"

#include <gtest/gtest.h>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace epd::cluster {
namespace {

// One end of a stream; what it writes waits at the other end until the test carries it.
class FakeStream final : public Stream {
 public:
  FakeStream(StreamEvents& events, PeerFacts peer) : events_(events), peer_(std::move(peer)) {}
  const PeerFacts& peer() const override { return peer_; }
  void read() override { reading_ = true; }
  void write(const v1::Frame& frame) override {
    EXPECT_FALSE(writing_) << "one frame at a time";
    writing_ = true;
    out_.push_back(frame);
  }
  void finish(const Status& status) override {
    finished_ = true;
    status_ = status;
  }

  StreamEvents& events_;
  const PeerFacts peer_;
  bool reading_ = false;
  bool writing_ = false;
  bool finished_ = false;
  Status status_;
  std::deque<v1::Frame> out_;
};

struct Pair {
  std::shared_ptr<FakeStream> agent;
  std::shared_ptr<FakeStream> coordinator;
  bool held_up = false;  // nothing passes, and nobody is told
};

constexpr std::uint32_t kTimeoutMs = 2'000;

class ClusterSides : public testing::Test {
 protected:
  ClusterSides() { restart_coordinator('A'); }

  Settings settings_of(const std::string& node) {
    return {"test", node, "127.0.0.1:1", node + ":1", "node-a:1", {"node-*"}, "",
            "",     "",   true,          100,         kTimeoutMs};
  }
  Self self_of(const std::string& node, char boot) {
    kept_.push_back(std::make_unique<Settings>(settings_of(node)));
    Self self{*kept_.back(), clock_, refusals_, {}};
    self.description.set_name(node);
    self.description.set_boot_id(std::string(16, boot));
    self.description.set_address(node + ":1");
    self.description.set_listen("127.0.0.1:1");
    self.description.set_daemon_version("0.1.0");
    return self;
  }
  void restart_coordinator(char boot) {
    coordinator_ = std::make_unique<CoordinatorSide>(
        self_of("node-a", boot), [this](const SocketAddress& address, std::function<void(bool)> answer) {
          probes_.emplace_back(to_string(address), std::move(answer));
        });
  }
  AgentSide& agent(const std::string& node, char boot) {
    agents_[node] =
        std::make_unique<AgentSide>(self_of(node, boot), [this, node]() -> std::shared_ptr<Stream> {
          Pair pair;
          pair.agent = std::make_shared<FakeStream>(*agents_.at(node), PeerFacts{"10.0.0.1:1", false, {}});
          pair.coordinator = std::make_shared<FakeStream>(*coordinator_, PeerFacts{"10.0.0.2:9", false, {}});
          streams_.push_back(pair);
          coordinator_->on_opened(pair.coordinator);
          return pair.agent;
        });
    return *agents_[node];
  }

  static bool carry(FakeStream& from, FakeStream& to) {
    bool moved = false;
    if (!from.out_.empty() && to.reading_ && !to.finished_) {
      const v1::Frame frame = from.out_.front();
      from.out_.pop_front();
      to.reading_ = false;
      to.events_.on_frame(to, frame);
      moved = true;
    }
    if (from.writing_ && from.out_.empty() && !from.finished_) {
      from.writing_ = false;
      from.events_.on_written(from);
      moved = true;
    }
    if (from.finished_ && from.out_.empty() && !to.finished_) {
      to.finished_ = true;
      to.events_.on_closed(to, from.status_);
      moved = true;
    }
    return moved;
  }
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t i = 0; i < streams_.size(); ++i) {  // it may grow
        const Pair pair = streams_[i];
        if (pair.held_up) continue;
        moved |= carry(*pair.agent, *pair.coordinator);
        moved |= carry(*pair.coordinator, *pair.agent);
      }
    }
  }
  void step(std::uint64_t ms) {
    for (std::uint64_t end = ms; end > 0;) {
      const std::uint64_t now = std::min<std::uint64_t>(end, 25);
      clock_.advance_ms(now);
      end -= now;
      tick();
    }
  }
  void tick() {
    coordinator_->tick();
    for (auto& [name, side] : agents_) side->tick();
    settle();
  }
  // As if the connection had been reset: both are told, what is under way is gone.
  void cut(const std::string& why = "reset") {
    for (const Pair& pair : streams_) {
      for (const auto& end : {pair.agent, pair.coordinator}) {
        end->out_.clear();
        if (end->finished_) continue;
        end->finished_ = true;
        end->events_.on_closed(*end, {StatusCode::kAborted, why});
      }
    }
  }
  static const NodeView* find(const View& view, const std::string& node) {
    for (const NodeView& one : view.nodes) {
      if (one.name == node) return &one;
    }
    return nullptr;
  }
  NodeState state(const Side& side, const std::string& node) {
    const View view = side.view();
    const NodeView* found = find(view, node);
    EXPECT_NE(found, nullptr) << node;
    return found == nullptr ? NodeState::kLost : found->state;
  }
  // A stream that the test speaks on by itself.
  std::shared_ptr<FakeStream> open_raw(PeerFacts peer = {"10.0.0.9:9", false, {}}) {
    auto stream = std::make_shared<FakeStream>(*coordinator_, std::move(peer));
    coordinator_->on_opened(stream);
    return stream;
  }
  static v1::Frame hello(const std::string& node, char boot) {
    v1::Frame frame;
    v1::Hello& hello = *frame.mutable_hello();
    hello.set_version_min(1);
    hello.set_version_max(3);
    hello.set_cluster("test");
    hello.mutable_node()->set_name(node);
    hello.mutable_node()->set_boot_id(std::string(16, boot));
    hello.mutable_node()->set_address(node + ":1");
    hello.mutable_node()->set_listen("0.0.0.0:1");
    return frame;
  }
  static void say(FakeStream& stream, const v1::Frame& frame) {
    stream.reading_ = false;
    stream.events_.on_frame(stream, frame);
  }

  ManualClock clock_;
  Refusals refusals_;
  std::vector<std::unique_ptr<Settings>> kept_;
  std::unique_ptr<CoordinatorSide> coordinator_;
  std::map<std::string, std::unique_ptr<AgentSide>> agents_;
  std::vector<Pair> streams_;
  std::vector<std::pair<std::string, std::function<void(bool)>>> probes_;
};

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
  refused([](v1::Hello& h) { h.set_version_min(2); }, plain, "it speaks versions 2..3, this daemon 1..1");
  refused([](v1::Hello& h) { h.set_version_max(0); }, plain, "it speaks versions 1..0");
  refused([](v1::Hello& h) { h.set_cluster("prod"); }, plain, "its cluster.name is \"prod\"");
  refused([](v1::Hello& h) { h.mutable_node()->set_name("rack-1"); }, plain,
          "is not allowed; cluster.nodes of node-a is node-*");
  refused([](v1::Hello& h) { h.mutable_node()->set_name("NODE-A"); }, plain,
          "another daemon is node node-a already");
  refused([](v1::Hello&) {}, {"10.0.0.9:9", true, {"node-y", "*.x"}},
          "its certificate does not name; allowed: node-y, *.x");
  EXPECT_EQ(refusals_.counts().size(), 5u);
  const auto good = open_raw({"10.0.0.9:9", true, {"NODE-X"}});
  say(*good, hello("node-x", 'X'));
  EXPECT_FALSE(good->finished_);
  EXPECT_EQ(good->out_.front().welcome().version(), 1u);
}

TEST_F(ClusterSides, WhoSaysNoHelloIsSentAway) {
  const auto stream = open_raw();
  step(4'900);
  EXPECT_FALSE(stream->finished_);
  step(200);
  EXPECT_TRUE(stream->finished_);
  std::vector<std::shared_ptr<FakeStream>> many;
  for (int i = 0; i < 65; ++i) many.push_back(open_raw());
  EXPECT_FALSE(many[63]->finished_);
  EXPECT_EQ(many[64]->status_.code(), StatusCode::kResourceExhausted);
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

}  // namespace
}  // namespace epd::cluster
