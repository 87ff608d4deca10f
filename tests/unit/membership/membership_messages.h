// A registry that is driven by messages alone: nothing is answered that a test does not answer.
#pragma once

#include "membership_fixture.h"

#include <algorithm>

namespace epd::membership {

class ByMessages : public testing::Test {
 protected:
  using Lines = std::vector<std::string>;

  explicit ByMessages(std::uint32_t nodes = 1) {
    for (std::uint32_t node = 0; node < nodes; ++node) {
      registry_.handle(NodeUp{node, {{"host:0", {}}, {"host:1", {}}}});
      for (std::uint32_t device = 0; device < 2; ++device) registry_.handle(EngineUp{{node, device}});
    }
  }

  // Returns the decisions about the event.
  Lines tell(const Event& event) {
    registry_.handle(event);
    return take();
  }
  Lines tick_after(std::uint64_t ms) {
    clock_.advance_ms(ms);
    registry_.tick();
    return take();
  }

  // The join of rank r on device r of the node, by session 10 + r and request 100 + r.
  JoinRequest join_of(std::uint32_t rank, std::uint32_t ranks, std::uint32_t node = kLocalNode) const {
    JoinRequest request;
    request.id = {{node, 10 + rank}, 100 + rank};
    request.uid = kUid;
    request.pid = static_cast<std::int32_t>(1000 + rank);
    request.engine = {node, rank % 2};
    std::strcpy(request.join.group, "g");
    request.join.rank = static_cast<std::int32_t>(rank);
    request.join.shape = shape_of(ranks, policy_);
    return request;
  }
  static MemoryAcquired acquired(const JoinRequest& join, std::uint32_t rank, std::uint64_t group = 1,
                                 StatusCode code = StatusCode::kOk) {
    return {join.id, group, rank, code == StatusCode::kOk ? Status() : Status(code, "none is left")};
  }
  static GroupReady ready(EngineId engine, std::vector<BoardIndex> boards = {}, std::uint64_t group = 1) {
    return {engine, {group, StatusCode::kOk, {}}, std::move(boards)};
  }
  static Broken broken(EngineId engine, std::uint64_t epoch, std::uint64_t next) {
    return {engine, {1, epoch, next}};
  }
  static BreakRequested break_asked(EngineId engine, std::uint64_t epoch) {
    BreakRequested event{engine, {}};
    event.message.group_id = 1;
    event.message.epoch = epoch;
    event.message.cause = StatusCode::kDeadlineExceeded;
    return event;
  }

  // Each rank on its own engine; the group is active when this returns.
  void activate(const std::vector<JoinRequest>& joins) {
    for (const JoinRequest& join : joins) registry_.handle(join);
    for (std::uint32_t rank = 0; rank < joins.size(); ++rank) registry_.handle(acquired(joins[rank], rank));
    for (const JoinRequest& join : joins) registry_.handle(ready(join.engine));
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }

  const Group& group(std::uint64_t id = 1) const { return registry_.groups().at(id); }

  LossPolicy policy_ = LossPolicy::kFailFast;
  ManualClock clock_;
  GroupRegistry registry_{clock_, MembershipLimits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch}};
  Actions actions_;  // the last ones
  Status refusal_;

 private:
  Lines take() {
    Lines lines;
    actions_ = registry_.take_actions();
    for (const Action& action : actions_) {
      lines.push_back(to_string(action));
      if (const auto* refused = std::get_if<ReplyRefused>(&action)) refusal_ = refused->status;
    }
    return lines;
  }
};

}  // namespace epd::membership
