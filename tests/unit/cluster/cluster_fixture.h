// A cluster in one thread and stepped time: the sides of its nodes over streams that the test carries, cuts
// and holds up, each with a real agent and an engine of the test's own.
#pragma once

#include "agent_side.h"
#include "base/clock.h"
#include "coordinator_side.h"
#include "frames.h"
#include "proto/arena.h"

#include <gtest/gtest.h>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace epd::cluster {

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
  std::string node;
  std::shared_ptr<FakeStream> agent;
  std::shared_ptr<FakeStream> coordinator;
  bool held_up = false;  // nothing passes, and nobody is told
};

inline constexpr std::uint32_t kTimeoutMs = 2'000;
inline constexpr std::uint32_t kHeartbeatMs = 100;
inline constexpr std::uint32_t kOrphanMs = 10'000;

// The parts of a node beside its side: its agent, one engine that obeys at once, and clients.
class TestNode {
 public:
  struct Known {
    std::uint64_t epoch = 0;
    membership::EpochKey key;
    bool serves = false;
    bool lost = false;
  };

  TestNode(const Clock& clock, const std::string& name, char boot)
      : agent(clock, {{kHeartbeatMs, kTimeoutMs, kOrphanMs},
                      {},
                      {membership::kLocalNode, {{"host:0", {}}}, name, std::string(1, boot), name + ":1"}}) {
    agent.handle(membership::EngineUp{kEngine, "address of " + name});
  }

  // Returns its request.
  std::uint32_t join(const std::string& group, std::uint32_t rank, std::uint32_t ranks) {
    membership::JoinRequest join;
    join.id = {{membership::kLocalNode, 1}, ++last_request_};
    join.uid = 1000;
    join.engine = kEngine;
    abi::set_text(join.join.group, group.data(), group.size());
    join.join.rank = static_cast<std::int32_t>(rank);
    join.join.shape = {
        ranks, ranks, 16, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, abi::LossPolicy::kFailFast};
    join.join.shape.span = abi::Span::kCluster;
    owed.insert(last_request_);
    agent.handle(join);
    return last_request_;
  }
  std::uint32_t leave(std::uint32_t member) {
    owed.insert(++last_request_);
    agent.handle(membership::LeaveRequest{{{membership::kLocalNode, 1}, last_request_}, member});
    return last_request_;
  }
  void ask_break(std::uint64_t group) {
    membership::BreakRequested event{kEngine, {}};
    event.message.group_id = group;
    event.message.epoch = groups.at(group).epoch;
    event.message.cause = StatusCode::kDeadlineExceeded;
    event.message.failed_rank = -1;
    agent.handle(event);
  }
  void work() {
    for (auto actions = agent.take_actions(); !actions.empty(); actions = agent.take_actions()) {
      for (const membership::Action& action : actions)
        std::visit([this](const auto& one) { carry_out(one); }, action);
    }
  }

  membership::Agent agent;
  bool ticks = true;
  std::map<std::uint64_t, Known> groups;  // of the engine
  std::set<std::pair<std::uint64_t, std::uint32_t>> memory;
  std::set<std::uint32_t> owed;                  // requests
  std::map<std::uint32_t, abi::Joined> joined;   // by request
  std::map<std::uint32_t, std::string> refused;  // likewise

 private:
  static constexpr membership::EngineId kEngine{membership::kLocalNode, 0};

  template <typename T>
  void carry_out(const T&) {}
  void carry_out(const membership::AcquireMemory& a) {
    EXPECT_TRUE(memory.emplace(a.group_id, a.rank).second) << "made twice";
    agent.handle(membership::MemoryAcquired{a.request, a.group_id, a.rank, {}});
  }
  void carry_out(const membership::ReleaseMemory& a) { memory.erase({a.group_id, a.rank}); }
  void carry_out(const membership::StartGroup& a) {
    const std::uint64_t id = a.group.label.id;
    EXPECT_TRUE(groups.emplace(id, Known{a.group.epoch, a.group.epoch_key, !a.broken, false}).second);
    agent.handle(membership::GroupReady{kEngine, {id, StatusCode::kOk, {}}, boards(id)});
  }
  void carry_out(const membership::SendBreak& a) {
    Known& known = groups.at(a.message.group_id);
    EXPECT_EQ(known.epoch, a.message.epoch);
    known.serves = false;
    known.lost |= a.message.fatal != 0;
    agent.handle(membership::Broken{kEngine, {a.message.group_id, a.message.epoch, 0}});
  }
  void carry_out(const membership::SendResume& a) {
    Known& known = groups.at(a.message.group_id);
    EXPECT_GT(a.message.epoch, known.epoch);
    known = {a.message.epoch, a.epoch_key, true, false};
    agent.handle(membership::Resumed{kEngine, {a.message.group_id, a.message.epoch}});
  }
  void carry_out(const membership::SendStopMember& a) {
    agent.handle(membership::MemberStopped{kEngine, a.message});
  }
  void carry_out(const membership::SendRemoveGroup& a) {
    groups.erase(a.message.group_id);
    agent.handle(membership::GroupRemoved{kEngine, a.message});
  }
  void carry_out(const membership::ReplyJoined& a) {
    answered(a.request.number);
    joined[a.request.number] = a.message;
  }
  void carry_out(const membership::ReplyLeft& a) { answered(a.request.number); }
  void carry_out(const membership::ReplyRefused& a) {
    answered(a.request.number);
    refused[a.request.number] = a.status.to_string();
  }
  void answered(std::uint32_t request) {
    EXPECT_EQ(owed.erase(request), 1u) << "request " << request << " is answered twice";
  }
  std::vector<membership::BoardIndex> boards(std::uint64_t id) const {
    std::vector<membership::BoardIndex> list;
    for (const auto& [group, rank] : memory) {
      if (group == id) list.push_back({group, rank, 0});
    }
    return list;
  }

  std::uint32_t last_request_ = 0;
};

class ClusterSides : public testing::Test {
 protected:
  ClusterSides() { restart_coordinator('A'); }

  Settings settings_of(const std::string& node) {
    return {"test", node, "127.0.0.1:1", node + ":1",  "node-a:1", {"node-*"}, "",
            "",     "",   true,          kHeartbeatMs, kTimeoutMs};
  }
  Self self_of(const std::string& node, char boot) {
    kept_.push_back(std::make_unique<Settings>(settings_of(node)));
    nodes_[node] = std::make_unique<TestNode>(clock_, node, boot);
    Self self{*kept_.back(), clock_, refusals_, {}, nodes_[node]->agent};
    self.description.set_name(node);
    self.description.set_boot_id(std::string(16, boot));
    self.description.set_address(node + ":1");
    self.description.set_listen("127.0.0.1:1");
    self.description.set_daemon_version("0.1.0");
    return self;
  }
  void restart_coordinator(char boot, std::uint64_t first_term = 1) {
    coordinator_.reset();
    CoordinatorSide::Options options{
        {}, kOrphanMs, first_term, [this] { return random_(); }, [this] { return wall_seconds_; }};
    coordinator_ = std::make_unique<CoordinatorSide>(
        self_of("node-a", boot), options,
        [this](const SocketAddress& address, std::function<void(bool)> answer) {
          probes_.emplace_back(to_string(address), std::move(answer));
        });
  }
  AgentSide& agent(const std::string& node, char boot) {
    agents_.erase(node);
    agents_[node] =
        std::make_unique<AgentSide>(self_of(node, boot), [this, node]() -> std::shared_ptr<Stream> {
          Pair pair;
          pair.node = node;
          pair.agent = std::make_shared<FakeStream>(*agents_.at(node), PeerFacts{"10.0.0.1:1", false, {}});
          pair.coordinator = std::make_shared<FakeStream>(*coordinator_, PeerFacts{"10.0.0.2:9", false, {}});
          streams_.push_back(pair);
          coordinator_->on_opened(pair.coordinator);
          return pair.agent;
        });
    return *agents_[node];
  }
  // Its daemon is gone, and its streams with it.
  void kill(const std::string& node) {
    for (const Pair& pair : streams_) {
      if (pair.node != node) continue;
      pair.agent->finished_ = true;
      end(*pair.coordinator, "reset");
    }
    agents_.erase(node);
    nodes_.erase(node);
  }
  static void end(FakeStream& stream, const std::string& why) {
    stream.out_.clear();
    if (stream.finished_) return;
    stream.finished_ = true;
    stream.events_.on_closed(stream, {StatusCode::kAborted, why});
  }
  TestNode& node(const std::string& name) { return *nodes_.at(name); }

  static bool carry_frame(FakeStream& from, FakeStream& to) {
    if (from.out_.empty() || !to.reading_ || to.finished_) return false;
    const v1::Frame frame = from.out_.front();
    from.out_.pop_front();
    to.reading_ = false;
    to.events_.on_frame(to, frame);
    return true;
  }
  static bool carry(FakeStream& from, FakeStream& to) {
    bool moved = carry_frame(from, to);
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
    for (auto& [name, node] : nodes_) {
      node->work();
      if (node->ticks) node->agent.tick();
    }
    coordinator_->tick();
    for (auto& [name, side] : agents_) side->tick();
    settle();
  }
  // As if the connection had been reset: both are told, what is under way is gone.
  void cut(const std::string& why = "reset") {
    for (const Pair& pair : streams_) {
      end(*pair.agent, why);
      end(*pair.coordinator, why);
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
    hello.set_version_min(2);
    hello.set_version_max(4);
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
  std::mt19937_64 random_{7};
  std::uint64_t wall_seconds_ = 1'787'600'000;
  std::map<std::string, std::unique_ptr<TestNode>> nodes_;
  std::unique_ptr<CoordinatorSide> coordinator_;
  std::map<std::string, std::unique_ptr<AgentSide>> agents_;
  std::vector<Pair> streams_;
  std::vector<std::pair<std::string, std::function<void(bool)>>> probes_;
};

}  // namespace epd::cluster
