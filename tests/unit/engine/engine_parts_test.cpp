// Objects of the engine, each alone: a group's life, the link to the supervisor and the sessions.
#include "engine_harness.h"
#include "group_life.h"
#include "sessions.h"
#include "supervisor_link.h"

#include <gtest/gtest.h>
#include <cstring>

namespace epd::test {
namespace {

using abi::LinkType;
using engine::GroupLife;
using enum engine::GroupPhase;

GroupLife life_of(std::initializer_list<engine::GroupPhase> phases, bool broken = false) {
  GroupLife life(broken);
  for (const engine::GroupPhase phase : phases) life.enter(phase);
  return life;
}

TEST(GroupLife, GoesOnAfterABreak) {
  GroupLife life = life_of({kStarting, kActive, kAsking, kBreaking, kBroken, kReleased});
  EXPECT_TRUE(life.takes_ranks());
  life.enter(kResuming);
  EXPECT_FALSE(life.takes_ranks());
  life.enter(kActive);
  EXPECT_TRUE(life.may(kAsking)) << "each epoch may ask once";
}

TEST(GroupLife, OneThatAFormerEngineServedIsBrokenWhenItHasFormed) {
  const GroupLife life = life_of({}, true);
  EXPECT_TRUE(life.is_forming());
  EXPECT_TRUE(life.may(kBroken));
  EXPECT_FALSE(life.may(kStarting));
  EXPECT_FALSE(life_of({}).may(kBroken));
}

TEST(GroupLife, AsksForABreakOnce) {
  EXPECT_FALSE(life_of({kStarting, kActive, kAsking}).may(kAsking));
  EXPECT_FALSE(life_of({kStarting, kActive, kBreaking}).may(kAsking));
}

TEST(GroupLife, IsResumedAndReleasedOnlyWhenItHasBroken) {
  for (const auto next : {kResuming, kReleased}) {
    EXPECT_FALSE(life_of({kStarting}).may(next));
    EXPECT_FALSE(life_of({kStarting, kActive}).may(next));
    EXPECT_FALSE(life_of({kStarting, kActive, kBreaking}).may(next));
    EXPECT_TRUE(life_of({kStarting, kActive, kBreaking, kBroken}).may(next));
  }
}

TEST(GroupLife, ASecondLossIsAcknowledgedAgainAndUnmapsNothing) {
  GroupLife life = life_of({kStarting, kActive});
  life.lose();
  EXPECT_TRUE(life.is(kLosing));
  life.lose();
  EXPECT_TRUE(life.is(kLosing));
  life.enter(kUnmapping);
  life.lose();
  EXPECT_TRUE(life.is(kUnmapping));
  life.enter(kUnmapped);
  life.enter(kLost);
  life.lose();
  EXPECT_TRUE(life.is(kUnmapped));
  EXPECT_FALSE(life.may(kBreaking)) << "it is lost for good";
}

TEST(GroupLife, IsNotLostBeforeItHasBegun) {
  EXPECT_FALSE(life_of({}).may_lose());
  EXPECT_FALSE(life_of({kStarting}).may_lose());
}

TEST(GroupLife, IsRemovedOnceFromAnywhere) {
  EXPECT_TRUE(life_of({}).may(kRemoving));
  EXPECT_TRUE(life_of({kStarting, kActive, kBreaking}).may(kRemoving));
  EXPECT_FALSE(life_of({kRemoving}).may(kRemoving));
  EXPECT_FALSE(life_of({kRemoving}).may_lose());
}

TEST(GroupLifeDeathTest, WhatMayNotFollowIsAContractFailure) {
  EXPECT_DEATH(life_of({kActive}), "check failed: may");
  EXPECT_DEATH(life_of({kRemoving, kActive}), "check failed: may");
}

class LinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto [ours, theirs] = make_socketpair().value();
    supervisor_ = std::move(ours);
    link_ = std::make_unique<engine::SupervisorLink>(std::move(theirs));
  }
  void receive() { link_->receive(clock_, clock_.now_ns() + 1'000'000'000); }
  std::optional<Packet> reply() const {
    Packet packet;
    Status error;
    if (receive_packet(supervisor_.get(), packet, error) != ReceiveResult::kPacket) return std::nullopt;
    return packet;
  }
  template <typename T>
  void say(LinkType type, const T& body) const {
    ASSERT_TRUE(send_message(supervisor_.get(), type, body).ok());
  }

  MonotonicClock clock_;
  UniqueFd supervisor_;
  std::unique_ptr<engine::SupervisorLink> link_;
};

struct Listener {
  Status hear(const abi::GroupRef& message) {
    heard.push_back(message.group_id);
    return message.group_id == 13 ? invalid_argument("13") : Status();
  }
  std::vector<std::uint64_t> heard;
};

TEST_F(LinkTest, EachMessageGoesToTheHandlerOfItsTypeUntilStop) {
  Listener commits;
  Listener removals;
  link_->on(LinkType::kGroupCommit, commits, &Listener::hear);
  link_->on(LinkType::kRemoveGroup, removals, &Listener::hear);
  say(LinkType::kGroupCommit, abi::GroupRef{1});
  say(LinkType::kRemoveGroup, abi::GroupRef{2});
  say(LinkType::kStop, std::uint32_t{0});
  say(LinkType::kGroupCommit, abi::GroupRef{3});
  receive();
  EXPECT_EQ(commits.heard, std::vector<std::uint64_t>{1});
  EXPECT_EQ(removals.heard, std::vector<std::uint64_t>{2});
  EXPECT_EQ(link_->exit_code(), 0);
}

TEST_F(LinkTest, WhatMakesNoSenseEndsTheEngine) {
  Listener commits;
  link_->on(LinkType::kGroupCommit, commits, &Listener::hear);
  say(LinkType::kGroupCommit, abi::GroupRef{13});
  say(LinkType::kGroupCommit, abi::GroupRef{1});
  receive();
  EXPECT_EQ(link_->exit_code(), 2);
  EXPECT_EQ(commits.heard, std::vector<std::uint64_t>{13});
}

TEST_F(LinkTest, ABodyOfAnotherSizeAndATypeWithoutHandlerEndTheEngine) {
  Listener commits;
  link_->on(LinkType::kGroupCommit, commits, &Listener::hear);
  say(LinkType::kGroupCommit, std::uint32_t{1});
  receive();
  EXPECT_EQ(link_->exit_code(), 2);
  EXPECT_TRUE(commits.heard.empty());
  SetUp();
  say(LinkType::kRemoveGroup, abi::GroupRef{1});
  receive();
  EXPECT_EQ(link_->exit_code(), 2);
}

TEST_F(LinkTest, TheEndOfTheSupervisorEndsTheEngine) {
  receive();
  EXPECT_FALSE(link_->exit_code().has_value());
  supervisor_.reset();
  receive();
  EXPECT_EQ(link_->exit_code(), 1);
}

TEST_F(LinkTest, WhatTheSocketHasNoRoomForWaitsAndKeepsItsOrder) {
  constexpr std::uint64_t kMany = 5000;
  for (std::uint64_t id = 0; id < kMany; ++id) link_->send(LinkType::kGroupRemoved, abi::GroupRef{id});
  std::uint64_t next = 0;
  while (next < kMany) {
    const std::optional<Packet> packet = reply();
    if (!packet) {
      receive();  // sends what waits
      continue;
    }
    ASSERT_EQ(packet->read<abi::GroupRef>().value().group_id, next++);
  }
}

class SessionsTest : public LinkTest {
 protected:
  void SetUp() override {
    LinkTest::SetUp();
    page_ = std::make_unique<engine::Page>(own_page());
    page_->start(1);
    sessions_ = std::make_unique<engine::Sessions>(*page_, *link_);
  }
  static Mapping own_page() {
    const UniqueFd fd = make_sealed_memfd("test-page", sizeof(abi::EnginePage)).value();
    return Mapping::map(fd.get(), sizeof(abi::EnginePage), Access::kReadWrite).value();
  }
  static UniqueFd memory(std::uint64_t bytes) { return make_sealed_memfd("test-session", bytes).value(); }
  void add(std::uint64_t id) {
    Packet packet;
    const abi::AddSession body{id, 0, 0};
    std::memcpy(packet.body.data(), &body, sizeof(body));
    packet.body_bytes = sizeof(body);
    packet.fds.push_back(memory(sizeof(abi::SegmentA)));
    packet.fds.push_back(memory(sizeof(abi::SegmentB)));
    packet.fds.push_back(make_eventfd().value());
    ASSERT_TRUE(sessions_->add(packet).ok());
  }

  std::unique_ptr<engine::Page> page_;
  std::unique_ptr<engine::Sessions> sessions_;
};

TEST_F(SessionsTest, AreForgottenAtOnce) {
  add(3);
  EXPECT_NE(sessions_->find(3), nullptr);
  ASSERT_TRUE(sessions_->remove(abi::SessionRef{3}).ok());
  EXPECT_EQ(sessions_->find(3), nullptr);
  const auto removed = reply();
  ASSERT_TRUE(removed.has_value());
  EXPECT_EQ(removed->header.type, static_cast<std::uint16_t>(LinkType::kSessionRemoved));
}

TEST_F(SessionsTest, OneThatIsUnknownHasGoneAlready) {
  ASSERT_TRUE(sessions_->remove(abi::SessionRef{4}).ok());
  const auto removed = reply();
  ASSERT_TRUE(removed.has_value());
  EXPECT_EQ(removed->read<abi::SessionRef>().value().session_id, 4u);
}

}  // namespace
}  // namespace epd::test
