// What the tests of the group protocol share: a registry without processes; events in, actions out, time by
// hand.
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

class FakeMemory final : public MemberMemory {
 public:
  using Key = std::pair<std::uint64_t, std::uint32_t>;
  Status check_reach(std::uint32_t device, std::uint32_t other) const override {
    const auto pair = std::minmax(device, other);
    if (!apart.contains({pair.first, pair.second})) return {};
    return {StatusCode::kUnsupported,
            "device " + std::to_string(device) + " does not reach device " + std::to_string(other)};
  }
  Status acquire(const MemoryOwner& owner, const UserQuotas&, const GroupShape&, const abi::Bindings&,
                 const ClientMemory&) override {
    const auto [group, rank] = std::pair(owner.group_id, owner.rank);
    if (held.size() >= limit) return resource_exhausted("no room");
    EXPECT_TRUE(held.insert({group, rank}).second) << "acquired twice: rank " << rank;
    board_index[{group, rank}] = 0;
    return {};
  }
  void release(std::uint64_t group, std::uint32_t rank) override {
    EXPECT_EQ(held.erase({group, rank}), 1u) << "released twice: rank " << rank;
  }
  std::uint64_t next_index(std::uint64_t group, std::uint32_t rank) override {
    return board_index[{group, rank}];
  }
  void close_streams_later(std::uint32_t device, std::uint64_t group, std::uint32_t rank) override {
    EXPECT_TRUE(held.contains({group, rank}));
    to_close.insert({device, rank});
  }
  void mark_lost(std::uint64_t, std::uint32_t rank, const std::string& text, StatusCode,
                 std::int32_t) override {
    lost[rank] = text;
  }

  std::size_t limit = 1000;
  std::set<Key> held;
  std::map<Key, std::uint64_t> board_index;
  std::map<std::uint32_t, std::string> lost;
  std::set<std::pair<std::uint32_t, std::uint32_t>> to_close;  // devices, ranks
  std::set<std::pair<std::uint32_t, std::uint32_t>> apart;     // devices, the lower first
};

inline GroupShape shape_of(std::uint32_t ranks, LossPolicy policy = LossPolicy::kFailFast) {
  return {ranks, ranks * 2, 16, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, policy};
}

// Sessions are numbered 10 + rank, requests 100 + session; rank r lives on device r % devices_.
class Membership : public testing::Test {
 protected:
  explicit Membership(std::uint32_t devices = 2) : devices_(devices) {
    for (std::uint32_t d = 0; d < devices_; ++d) registry_.engine_up(d);
  }

  JoinRequest request(std::uint32_t rank, std::uint32_t ranks, const char* name = "g") const {
    JoinRequest r;
    r.session_id = 10 + rank;
    r.request_id = 100 + rank;
    r.uid = kUid;
    r.pid = static_cast<std::int32_t>(1000 + rank);
    r.device = rank % devices_;
    r.device_kind = kind_;
    std::strcpy(r.join.group, name);
    r.join.rank = static_cast<std::int32_t>(rank);
    r.join.shape = shape_of(ranks, policy_);
    return r;
  }

  std::vector<std::string> take() {
    std::vector<std::string> lines;
    for (const Action& action : registry_.take_actions()) {
      lines.push_back(to_string(action));
      if (const auto* refused = std::get_if<ReplyRefused>(&action)) refusal_ = refused->status;
      if (const auto* sent = std::get_if<SendBreak>(&action)) break_text_ = sent->message.text;
      if (const auto* joined = std::get_if<ReplyJoined>(&action))
        members_[joined->session_id] = joined->message.member;
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

  void ready(std::uint32_t device, std::uint64_t id = 1) {
    registry_.group_ready(device, {id, StatusCode::kOk, {}});
  }
  void broken(std::uint32_t device, std::uint64_t next, std::uint64_t epoch = 1) {
    registry_.broken(device, {1, epoch, next});
  }
  void resumed(std::uint32_t device, std::uint64_t epoch) { registry_.resumed(device, {1, epoch}); }
  void stopped(std::uint32_t rank, std::uint64_t next_submit) {
    registry_.member_stopped(rank % devices_, {1, rank, 0, next_submit});
  }
  void removed(std::uint32_t device, std::uint64_t id = 1) { registry_.group_removed(device, {id}); }
  void request_break(std::uint32_t device, std::uint64_t epoch = 1) {
    abi::Break wanted{};
    wanted.group_id = 1;
    wanted.epoch = epoch;
    wanted.cause = StatusCode::kDeadlineExceeded;
    wanted.culprit_rank = 1;
    abi::set_text(wanted.text, "rank 1 did not come", 19);
    registry_.break_requested(device, wanted);
  }
  // Joins all ranks and answers for the engines; the group is active when this returns.
  void activate(std::uint32_t ranks) {
    for (std::uint32_t r = 0; r < ranks; ++r) registry_.join(request(r, ranks));
    for (std::uint32_t d = 0; d < std::min(ranks, devices_); ++d) ready(d);
    take();
    ASSERT_EQ(group().phase(), GroupPhase::kActive);
  }

  using Lines = std::vector<std::string>;
  const std::uint32_t devices_;
  LossPolicy policy_ = LossPolicy::kFailFast;
  abi::DeviceKind kind_ = abi::DeviceKind::kHost;
  ManualClock clock_;
  FakeMemory memory_;
  GroupRegistry registry_{clock_, memory_, MembershipLimits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch}};
  Status refusal_;
  std::string break_text_;
  std::map<std::uint64_t, std::uint32_t> members_;
};

}  // namespace epd::membership
