// The common parts of the tests of the group protocol: a registry without processes; events in, actions out,
// time by hand.
#pragma once

#include "membership/registry.h"

#include "base/clock.h"

#include <gtest/gtest.h>
#include <cstring>
#include <map>
#include <set>

namespace epd::membership {

using abi::GroupShape;
using abi::LossPolicy;

inline constexpr std::uint32_t kUid = 1000;
inline constexpr std::uint64_t kLastEpoch = 100;  // in place of abi::kLastEpoch

// The memory of the ranks of one node.
struct FakeMemory {
  using Key = std::pair<std::uint64_t, std::uint32_t>;  // group, rank

  Status acquire(const AcquireMemory& action) {
    const Key key(action.group_id, action.rank);
    if (held.size() >= limit) {
      refused.insert(key);
      return resource_exhausted("no room");
    }
    EXPECT_TRUE(held.insert(key).second) << "acquired twice: rank " << action.rank;
    engine_of[key] = action.engine;
    board_index[key] = 0;
    return {};
  }
  void close_later(const CloseStreams& action) {
    EXPECT_TRUE(held.contains({action.group_id, action.rank}));
    to_close.insert({action.engine.device, action.rank});
  }
  // The boards on an engine, and if given of a group.
  std::vector<BoardIndex> boards_on(EngineId engine, std::uint64_t group = 0) const {
    std::vector<BoardIndex> boards;
    for (const auto& key : held) {
      if (engine_of.at(key) == engine && (group == 0 || group == key.first))
        boards.push_back({key.first, key.second, board_index.at(key)});
    }
    return boards;
  }

  std::size_t limit = 1000;
  std::set<Key> held;
  std::set<Key> refused;
  std::map<Key, EngineId> engine_of;
  std::map<Key, std::uint64_t> board_index;
  std::map<std::uint32_t, std::string> lost;
  std::set<std::pair<std::uint32_t, std::uint32_t>> to_close;  // devices, ranks
};

inline GroupShape shape_of(std::uint32_t ranks, LossPolicy policy = LossPolicy::kFailFast) {
  return {ranks, ranks * 2, 16, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, policy};
}

// The shape of a group that may span nodes.
inline GroupShape spanning_shape_of(std::uint32_t ranks, LossPolicy policy = LossPolicy::kFailFast) {
  GroupShape shape = shape_of(ranks, policy);
  shape.span = abi::Span::kCluster;
  return shape;
}

// Sessions are numbered 10 + rank, requests 100 + session; rank r lives on device r % devices_. All is on one
// node: what the registry wants of memory is done and answered at once.
class Membership : public testing::Test {
 protected:
  explicit Membership(std::uint32_t devices = 2) : devices_(devices) {
    for (std::uint32_t d = 0; d < devices_; ++d) node_.devices.push_back({"host:" + std::to_string(d), {}});
    registry_.handle(node_);
    for (std::uint32_t d = 0; d < devices_; ++d) engine_up(d);
  }

  JoinRequest request(std::uint32_t rank, std::uint32_t ranks, const char* name = "g") const {
    JoinRequest r;
    r.id = {{kLocalNode, 10 + rank}, 100 + rank};
    r.uid = kUid;
    r.pid = static_cast<std::int32_t>(1000 + rank);
    r.engine.device = rank % devices_;
    r.device_kind = kind_;
    std::strcpy(r.join.group, name);
    r.join.rank = static_cast<std::int32_t>(rank);
    r.join.shape = shape_of(ranks, policy_);
    return r;
  }

  // The node tells an event.
  void handle(const Event& event) {
    registry_.handle(event);
    carry_out();
  }
  void tick() {
    registry_.tick();
    carry_out();
  }
  void set_apart(std::uint32_t device, std::uint32_t other) {
    node_.devices[device].unreachable.push_back(other);
    node_.devices[other].unreachable.push_back(device);
    handle(node_);
  }
  void join(const JoinRequest& r) { handle(r); }
  void leave(std::uint64_t session, std::uint32_t number, std::uint32_t member) {
    handle(LeaveRequest{{{kLocalNode, session}, number}, member});
  }
  void session_closed(std::uint64_t session, const std::string& how) {
    handle(SessionClosed{{kLocalNode, session}, how});
  }
  void evict(std::uint64_t id, std::uint32_t rank, const std::string& how) {
    handle(EvictRank{id, rank, how});
  }
  void engine_up(std::uint32_t device) { handle(EngineUp{{kLocalNode, device}}); }
  void engine_down(std::uint32_t device, const std::string& text) {
    const EngineId engine{kLocalNode, device};
    handle(EngineDown{engine, text, memory_.boards_on(engine)});
  }
  // The node's engines say these.
  void say(std::uint32_t device, const abi::GroupReady& message) {
    const EngineId engine{kLocalNode, device};
    handle(GroupReady{engine, message, memory_.boards_on(engine, message.group_id)});
  }
  void say(std::uint32_t device, const abi::GroupWaits& m) { handle(GroupWaits{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::MemberRef& m) { handle(MemberStopped{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::Break& m) { handle(BreakRequested{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::Broken& m) { handle(Broken{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::Resumed& m) { handle(Resumed{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::GroupRef& m) { handle(GroupRemoved{{kLocalNode, device}, m}); }
  void say(std::uint32_t device, const abi::RankRefused& m) { handle(RankRefused{{kLocalNode, device}, m}); }

  std::vector<std::string> take() {
    std::vector<std::string> lines;
    for (const Action& action : std::exchange(decided_, {})) {
      lines.push_back(to_string(action));
      if (const auto* refused = std::get_if<ReplyRefused>(&action)) refusal_ = refused->status;
      if (const auto* sent = std::get_if<SendBreak>(&action)) break_text_ = sent->message.text;
      const auto* joined = std::get_if<ReplyJoined>(&action);
      if (joined == nullptr) continue;
      joined_ = joined->message;
      if (joined_.kept != 0) continue;
      members_[joined->request.session.number] = joined->message.member;
      shares_device_[joined->request.session.number] = joined->message.shares_device;
    }
    return lines;
  }

  // The same without the questions to living ranks that follow a fatal kBreak.
  std::vector<std::string> take_breaks() {
    std::vector<std::string> lines = take();
    std::erase_if(lines, [](const std::string& line) { return line.rfind("stop_member", 0) == 0; });
    return lines;
  }

  const Group& group(std::uint64_t id = 1) const { return registry_.groups().at(id); }
  bool known(std::uint64_t id = 1) const { return registry_.groups().count(id) == 1; }
  EnginePhase engine_phase(std::uint32_t device) const {
    return group().engines.at({kLocalNode, device}).phase();
  }

  void ready(std::uint32_t device, std::uint64_t id = 1) {
    say(device, abi::GroupReady{id, StatusCode::kOk, {}});
  }
  void broken(std::uint32_t device, std::uint64_t next, std::uint64_t epoch = 1) {
    say(device, abi::Broken{1, epoch, next});
  }
  void resumed(std::uint32_t device, std::uint64_t epoch) { say(device, abi::Resumed{1, epoch}); }
  void stopped(std::uint32_t rank, std::uint64_t next_submit) {
    say(rank % devices_, abi::MemberRef{1, rank, 0, next_submit});
  }
  void removed(std::uint32_t device, std::uint64_t id = 1) { say(device, abi::GroupRef{id}); }
  void request_break(std::uint32_t device, std::uint64_t epoch = 1) {
    abi::Break wanted{};
    wanted.group_id = 1;
    wanted.epoch = epoch;
    wanted.cause = StatusCode::kDeadlineExceeded;
    wanted.failed_rank = 1;
    abi::set_text(wanted.text, "rank 1 did not come", 19);
    say(device, wanted);
  }
  // Joins all ranks and answers for the engines; the group is active when this returns.
  void activate(std::uint32_t ranks) {
    for (std::uint32_t r = 0; r < ranks; ++r) join(request(r, ranks));
    for (std::uint32_t d = 0; d < std::min(ranks, devices_); ++d) ready(d);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }

  using Lines = std::vector<std::string>;
  const std::uint32_t devices_;
  LossPolicy policy_ = LossPolicy::kFailFast;
  abi::DeviceKind kind_ = abi::DeviceKind::kHost;
  ManualClock clock_;
  NodeUp node_;
  FakeMemory memory_;
  GroupRegistry registry_{clock_, MembershipLimits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch}};
  Status refusal_;
  abi::Joined joined_{};  // the last one
  std::string break_text_;
  std::map<std::uint64_t, std::uint32_t> members_;        // by session
  std::map<std::uint64_t, std::uint32_t> shares_device_;  // likewise

 private:
  void carry_out() {
    for (Actions actions = registry_.take_actions(); !actions.empty(); actions = registry_.take_actions()) {
      for (Action& action : actions) {
        if (!of_memory(action)) decided_.push_back(std::move(action));
      }
    }
  }
  bool of_memory(const Action& action) {
    const auto* close = std::get_if<CloseStreams>(&action);
    if (const auto* wanted = std::get_if<AcquireMemory>(&action)) {
      registry_.handle(
          MemoryAcquired{wanted->request, wanted->group_id, wanted->rank, memory_.acquire(*wanted)});
    } else if (const auto* unused = std::get_if<ReleaseMemory>(&action)) {
      EXPECT_EQ(memory_.held.erase({unused->group_id, unused->rank}), 1u)
          << "released twice: rank " << unused->rank;
    } else if (const auto* lost = std::get_if<MarkLost>(&action)) {
      memory_.lost[lost->rank] = lost->text;
    } else if (close != nullptr && close->later) {
      memory_.close_later(*close);
    } else {
      return false;
    }
    return true;
  }

  Actions decided_;  // but for what is wanted of memory
};

}  // namespace epd::membership
