// Groups that span nodes, over both sides: agents and a coordinator that know of each other by streams alone.
#include "base/event.h"
#include "base/log.h"
#include "cluster_fixture.h"

namespace epd::cluster {
namespace {

class ClusterGroups : public ClusterSides {
 protected:
  ClusterGroups() { log_.install(); }

  // Ranks 0 and 1 on these nodes; the group serves when this returns.
  std::uint64_t form(const std::string& first, const std::string& second, const std::string& name = "g") {
    const std::uint32_t one = node(first).join(name, 0, 2);
    const std::uint32_t other = node(second).join(name, 1, 2);
    step(500);
    EXPECT_TRUE(node(first).joined.contains(one)) << node(first).refused[one];
    EXPECT_TRUE(node(second).joined.contains(other)) << node(second).refused[other];
    return node(first).joined[one].group_id;
  }
  void expect_serves(std::uint64_t group, const std::string& name, std::uint64_t epoch) {
    ASSERT_TRUE(node(name).groups.contains(group)) << name;
    EXPECT_TRUE(node(name).groups[group].serves) << name;
    EXPECT_EQ(node(name).groups[group].epoch, epoch) << name;
  }
  std::size_t count(EventKind kind, const std::string& node) {
    std::size_t n = 0;
    for (const Event& event : log_.read(0, 10'000, 0).events) {
      n += event.kind == kind && event.text != "coordinator lost" && !event.fields.empty() &&
           event.fields[0].second == node;
    }
    return n;
  }

  EventLog log_;
};

TEST_F(ClusterGroups, AGroupFormsAndBreaksAndEnds) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);  // the coordinator has listened
  const std::uint64_t id = form("node-a", "node-b");
  expect_serves(id, "node-a", 1);
  expect_serves(id, "node-b", 1);
  EXPECT_EQ(node("node-a").groups[id].key, node("node-b").groups[id].key);
  EXPECT_NE(node("node-a").groups[id].key, membership::EpochKey{});
  const std::vector<SpanningGroup> groups = coordinator_->spanning_groups();
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].name, "g");
  EXPECT_EQ(groups[0].phase, membership::GroupPhase::kActive);
  EXPECT_EQ(groups[0].ranks,
            (std::vector<std::pair<std::uint32_t, std::string>>{{0, "node-a"}, {1, "node-b"}}));
  node("node-b").ask_break(id);
  step(300);
  expect_serves(id, "node-a", 2);
  expect_serves(id, "node-b", 2);
  node("node-a").leave(node("node-a").joined.begin()->second.member);
  node("node-b").leave(node("node-b").joined.begin()->second.member);
  step(500);
  EXPECT_TRUE(node("node-a").owed.empty() && node("node-b").owed.empty());
  EXPECT_TRUE(node("node-a").memory.empty() && node("node-b").memory.empty());
  EXPECT_TRUE(coordinator_->spanning_groups().empty());
}

TEST_F(ClusterGroups, AStreamThatBreaksCostsNothing) {
  agent("node-b", 'B');
  agent("node-c", 'C');
  step(kTimeoutMs + 200);
  const std::uint64_t id = form("node-b", "node-c");
  for (int i = 0; i < 20; ++i) {
    node("node-b").ask_break(id);
    clock_.advance_ms(25);
    for (auto& [name, one] : nodes_) one->work();
    for (auto& [name, side] : agents_) side->tick();
    cut();  // what was written is gone
    step(400);
  }
  expect_serves(id, "node-b", node("node-c").groups[id].epoch);
  EXPECT_GE(node("node-b").groups[id].epoch, 20u) << "each request has arrived";
  EXPECT_EQ(count(EventKind::kNodeLost, "node-b"), 0u);
}

TEST_F(ClusterGroups, ALostNodeEndsItsGroupsAndComesBack) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  const std::uint64_t id = form("node-a", "node-b");
  kill("node-b");
  probes_.at(0).second(true);
  step(200);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kLost);
  EXPECT_TRUE(node("node-a").groups[id].lost);
  step(3 * kTimeoutMs);
  EXPECT_EQ(count(EventKind::kNodeLost, "node-b"), 1u);
  agent("node-b", 'D');
  step(500);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  expect_serves(form("node-a", "node-b", "h"), "node-b", 1);
}

// Cut off for too long: one judge, and what the node still has to say of before is not heard.
TEST_F(ClusterGroups, ASilentNodeIsLostOnce) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  const std::uint64_t id = form("node-a", "node-b");
  streams_.back().held_up = true;
  step(kTimeoutMs + 200);
  EXPECT_TRUE(node("node-a").groups[id].lost);
  step(2'000);  // it has attached again
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  EXPECT_TRUE(node("node-b").agent.attached());
  EXPECT_TRUE(node("node-b").groups[id].lost) << "it has been told that it was put out";
  EXPECT_EQ(count(EventKind::kNodeLost, "node-b"), 1u);
  EXPECT_EQ(count(EventKind::kNodeUp, "node-b"), 2u);
  expect_serves(form("node-a", "node-b", "h"), "node-b", 1);
}

// Its channel lives, and its agent says nothing: the coordinator of groups gives it up, and so do all.
TEST_F(ClusterGroups, AnAgentThatStandsStillIsLostForAll) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  node("node-b").ticks = false;
  step(kTimeoutMs + 50);
  EXPECT_EQ(count(EventKind::kNodeLost, "node-b"), 1u);
  node("node-b").ticks = true;
  step(1'000);
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
  EXPECT_EQ(count(EventKind::kNodeLost, "node-b"), 1u);
  EXPECT_TRUE(node("node-b").agent.attached());
}

TEST_F(ClusterGroups, ACoordinatorThatRestartsTakesItsGroupsBack) {
  agent("node-b", 'B');
  agent("node-c", 'C');
  step(kTimeoutMs + 200);
  const std::uint64_t id = form("node-b", "node-c");
  for (const std::uint64_t first_term : {1'000u, 1u}) {  // the second one's clock is behind
    cut("Connection refused");
    restart_coordinator(first_term == 1 ? 'F' : 'E', first_term);
    step(2 * kTimeoutMs);
    EXPECT_EQ(coordinator_->view().term, first_term == 1 ? 1'001u : 1'000u);
    for (const char* name : {"node-a", "node-b", "node-c"}) {
      EXPECT_TRUE(node(name).agent.attached()) << name;
      EXPECT_EQ(node(name).agent.term(), coordinator_->view().term) << name;
    }
    expect_serves(id, "node-b", 1);
    expect_serves(id, "node-c", 1);
    EXPECT_EQ(coordinator_->spanning_groups().size(), 1u);
  }
  node("node-b").ask_break(id);
  step(300);
  expect_serves(id, "node-b", 2);
  expect_serves(id, "node-c", 2);
}

TEST_F(ClusterGroups, ASupersededCoordinatorIsReplaced) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  // The own agent has obeyed another coordinator, which nobody here knew.
  membership::Agent& own = node("node-a").agent;
  own.channel_began();
  for (const membership::ToCoordinator& message : own.take_messages()) {
    if (const auto* attach = std::get_if<membership::Attach>(&message.body))
      own.handle(membership::ToAgent{50, 9, membership::Welcome{attach->attempt, {}}});
  }
  step(2 * kTimeoutMs);
  EXPECT_EQ(coordinator_->view().term, 51u);
  EXPECT_TRUE(own.attached());
  EXPECT_TRUE(node("node-b").agent.attached());
  expect_serves(form("node-a", "node-b"), "node-b", 1);
}

TEST_F(ClusterGroups, TermsAreJudged) {
  agent("node-b", 'B');
  step(200);
  const auto told = [&](std::uint64_t term, const std::string& name, char coordinator) {
    const auto raw = open_raw();
    v1::Frame frame = hello(name, 'X');
    frame.mutable_hello()->set_term(term);
    frame.mutable_hello()->set_coordinator_boot_id(std::string(16, coordinator));
    say(*raw, frame);
    return raw;
  };
  EXPECT_EQ(told(kMaxTerm - 1, "node-x", 'Q')->status_.message(),
            "its term is 281474976710655; allowed: at most 6082567296, by this node's clock");
  EXPECT_EQ(told(2, "node-x", 'A')->status_.message(),
            "its term is 2; allowed: at most 1, which is this coordinator's");
  EXPECT_EQ(coordinator_->view().term, 1u);
  const auto first = told(7, "node-x", 'Q');
  EXPECT_FALSE(first->finished_);
  EXPECT_EQ(coordinator_->view().term, 8u);
  end(*first, "reset");
  EXPECT_EQ(told(8, "node-x", 'Q')->status_.message(),
            "node node-x has raised the term to 8; allowed: once in 8000 ms");
  EXPECT_EQ(coordinator_->view().term, 8u);
  EXPECT_FALSE(told(9, "node-y", 'Q')->finished_) << "another one may";
  const auto counts = refusals_.counts();
  EXPECT_EQ(counts, (std::vector<std::pair<std::string, std::uint64_t>>{{"term", 3}}));
  step(8'000);
  EXPECT_FALSE(told(11, "node-x", 'Q')->finished_);
  EXPECT_EQ(coordinator_->view().term, 12u);
}

// A node raises the term as far as it may. Nobody is shut out by that, not even if the coordinator then
// starts again with the term of its clock.
TEST_F(ClusterGroups, TermsThatWereRaisedLeaveRoomForTheNextCoordinator) {
  restart_coordinator('A', wall_seconds_);
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t most = wall_seconds_ + (std::uint64_t{1} << 32);
    const auto raw = open_raw();
    v1::Frame frame = hello("node-x", 'X');
    frame.mutable_hello()->set_term(most);
    frame.mutable_hello()->set_coordinator_boot_id(std::string(16, 'Q'));
    say(*raw, frame);
    EXPECT_FALSE(raw->finished_) << raw->status_.message();
    EXPECT_EQ(coordinator_->view().term, most + 1);
    end(*raw, "reset");
    step(4 * kTimeoutMs);
    EXPECT_TRUE(node("node-b").agent.attached());
    EXPECT_EQ(node("node-b").agent.term(), most + 1);
    cut("Connection refused");
    wall_seconds_ += 9;
    restart_coordinator(static_cast<char>('E' + i), wall_seconds_);
    step(4 * kTimeoutMs);
    EXPECT_TRUE(node("node-b").agent.attached());
    EXPECT_EQ(coordinator_->view().term, most + 2);
  }
  EXPECT_TRUE(refusals_.counts().empty());
}

// While the coordinator listens nobody can have obeyed it. A node that says so again and again can't keep it
// from opening.
TEST_F(ClusterGroups, TheTermOfACoordinatorThatListensIsNotRaisedByItsNodes) {
  agent("node-b", 'B');
  step(200);
  v1::NodeMessage content;
  content.set_to_coordinator(
      encode(membership::ToCoordinator{1, membership::AgentHeartbeat{true}}, kMaxNodeFrameBytes));
  const auto raw = open_raw();
  say(*raw, hello("node-x", 'X'));
  v1::Frame frame;
  v1::ChannelMessage& message = *frame.mutable_message();
  message.set_term(1);
  message.set_boot_id(std::string(16, 'X'));
  message.set_number(1);
  message.set_payload(content.SerializeAsString());
  say(*raw, frame);
  EXPECT_TRUE(raw->finished_);
  EXPECT_NE(raw->status_.message().find("term is 1; allowed: at most 0, while the coordinator listens"),
            std::string::npos)
      << raw->status_.message();
  step(kTimeoutMs);
  EXPECT_EQ(coordinator_->view().term, 1u);
  EXPECT_TRUE(node("node-b").agent.attached());
}

// The event is no agent's: its node is lost, since the channel can't continue without that; nobody else is.
TEST_F(ClusterGroups, AnIllegalEventIsItsNodesEnd) {
  agent("node-b", 'B');
  step(kTimeoutMs + 200);
  const auto say_content = [&](const std::string& name, const v1::NodeMessage& content) {
    const auto raw = open_raw();
    say(*raw, hello(name, 'X'));
    v1::Frame frame;
    v1::ChannelMessage& message = *frame.mutable_message();
    message.set_term(1);
    message.set_boot_id(std::string(16, 'X'));
    message.set_number(1);
    message.set_payload(content.SerializeAsString());
    say(*raw, frame);
    EXPECT_TRUE(raw->finished_);
    EXPECT_EQ(state(*coordinator_, name), NodeState::kLost);
    return raw->status_.message();
  };
  v1::NodeMessage content;
  content.set_to_coordinator(
      encode(membership::ToCoordinator{2, membership::Superseded{}}, kMaxNodeFrameBytes));
  EXPECT_NE(
      say_content("node-x", content).find("term is 2; allowed: at most 1, which is that of the channel"),
      std::string::npos);
  content.set_to_coordinator(std::string("\x08\x01\x22\x00", 4));  // term 1, a Told without an event
  EXPECT_NE(say_content("node-x", content).find("told.event.what is none that is known"), std::string::npos);
  content.mutable_table();
  EXPECT_NE(say_content("node-x", content).find("what only the coordinator says"), std::string::npos);
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"frame", 3}}));
  EXPECT_EQ(state(*coordinator_, "node-b"), NodeState::kUp);
}

// Random streams that break, nodes that die, and coordinators that restart, from a seed; then quiet, in which
// everything has to come to its end.
class ClusterGroupsRandom : public ClusterGroups, public testing::WithParamInterface<int> {
 protected:
  std::uint64_t below(std::uint64_t bound) { return chance_() % bound; }
  std::string any() { return std::string("node-") + static_cast<char>('a' + below(3)); }

  void happen() {
    const std::string name = any();
    switch (below(12)) {
      case 0: cut(); break;
      case 1:
        if (!streams_.empty()) streams_.back().held_up = true;
        break;
      case 2:
        if (name == "node-a" || below(4) != 0) break;
        kill(name);
        agent(name, boot_ = next_boot());
        break;
      case 3:
        if (below(8) != 0) break;
        cut("Connection refused");
        restart_coordinator(boot_ = next_boot(), 1 + below(3) * 10);
        break;
      case 4: {
        TestNode& one = node(name);
        if (!one.joined.empty() && below(3) == 0) {
          one.leave(one.joined.begin()->second.member);
          one.joined.erase(one.joined.begin());
        }
        break;
      }
      case 5:
      case 6:
        for (const auto& [id, known] : node(name).groups) {
          if (known.serves && below(2) == 0) {
            node(name).ask_break(id);
            break;
          }
        }
        break;
      case 7:
      case 8: join_all("g" + std::to_string(++last_group_)); break;
      default: break;
    }
  }
  void join_all(const std::string& name) {
    const std::string first = any();
    std::string second = any();
    node(first).join(name, 0, 2);
    node(second).join(name, 1, 2);
  }
  char next_boot() { return static_cast<char>(boot_ + 1); }

  std::mt19937_64 chance_{static_cast<std::uint64_t>(GetParam())};
  char boot_ = 'c';
  int last_group_ = 0;
};

TEST_P(ClusterGroupsRandom, EverythingComesToItsEnd) {
  log_set_levels(LogLevel::kOff);
  agent("node-b", 'B');
  agent("node-c", 'C');
  step(kTimeoutMs + 200);
  std::set<std::uint64_t> served;
  std::uint64_t last_epoch = 0;
  for (int i = 0; i < 250; ++i) {
    happen();
    step(25 * (1 + below(8)));
    for (const auto& [name, one] : nodes_) {
      for (const auto& [id, known] : one->groups) {
        if (known.serves) served.insert(id);
        last_epoch = std::max(last_epoch, known.epoch);
      }
    }
  }
  EXPECT_GE(served.size(), 5u) << "what this is for has hardly happened";
  EXPECT_GE(last_epoch, 3u) << "likewise";
  cut();
  // Ranks that wait for one that is gone are refused at last.
  step(61'000 + kOrphanMs);
  for (auto& [name, one] : nodes_) {
    EXPECT_TRUE(one->agent.attached()) << name;
    EXPECT_TRUE(one->owed.empty()) << name << " waits for request " << *one->owed.begin();
  }
  std::map<std::uint64_t, std::set<std::uint64_t>> epochs;
  for (auto& [name, one] : nodes_) {
    for (const auto& [id, known] : one->groups) {
      EXPECT_TRUE(known.serves || known.lost) << name << " group " << id;
      if (known.serves) epochs[id].insert(known.epoch);
    }
  }
  for (const auto& [id, of_group] : epochs) EXPECT_EQ(of_group.size(), 1u) << "group " << id;
  for (const SpanningGroup& group : coordinator_->spanning_groups())
    EXPECT_TRUE(group.phase == membership::GroupPhase::kActive ||
                group.phase == membership::GroupPhase::kLost);
  const std::uint64_t id = form("node-b", "node-c", "last");
  expect_serves(id, "node-b", 1);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ClusterGroupsRandom, testing::Range(1, 21));

}  // namespace
}  // namespace epd::cluster
