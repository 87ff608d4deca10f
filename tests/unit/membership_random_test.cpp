// The group protocol under random events: sessions that come, leave and die, engines that die, stand still
// and come back, messages that cross. Engines are simulated, each with its two queues.
#include "membership_fixture.h"

#include <algorithm>
#include <deque>
#include <random>

namespace epd::membership {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kDevices = 3;

// What an engine knows of a group; refuses what the real one would end itself for.
struct KnownGroup {
  enum class Phase { kServing, kBroken, kLost } phase = Phase::kServing;
  std::uint64_t epoch = 0;
  std::set<std::uint32_t> ranks;    // active
  std::set<std::uint32_t> members;  // of this device
};

struct Engine {
  bool up = true;
  bool stopped = false;  // takes nothing
  std::deque<std::function<void()>> inbox;
  std::deque<std::function<void()>> outbox;
  std::map<std::uint64_t, KnownGroup> groups;
};

class RandomMembership : public Membership {
 protected:
  RandomMembership() : Membership(kDevices) {}

  void run(std::uint64_t seed, LossPolicy policy) {
    policy_ = policy;
    random_.seed(seed);
    MembershipLimits limits{4, 60'000, 3'000, 10'000, 30'000, kLastEpoch};
    limits.conflict_ms = seed % 3 == 0 ? 250 : 0;
    registry_.set_limits(limits);
    kind_ = seed % 2 == 0 ? abi::DeviceKind::kCuda : abi::DeviceKind::kHost;
    for (int turn = 0; turn < 400; ++turn) {
      step();
      collect();
      if (HasFatalFailure()) return;
    }
    settle();
    for (const auto& [id, group] : registry_.groups()) check_settled(group);
    for (const std::uint64_t session : std::set<std::uint64_t>(open_)) close(session);
    settle();
    EXPECT_TRUE(registry_.groups().empty());
    EXPECT_TRUE(memory_.held.empty());
    EXPECT_TRUE(owed_.empty()) << "a request of session " << (owed_.empty() ? 0 : owed_.begin()->first);
    for (const Engine& engine : engines_) EXPECT_TRUE(engine.groups.empty());
    EXPECT_EQ(registry_.next_due_ns(), std::numeric_limits<std::uint64_t>::max());
  }

 private:
  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  void step() {
    const std::uint32_t device = below(kDevices);
    Engine& engine = engines_[device];
    switch (below(24)) {
      case 0:
      case 1: join(); break;
      case 2: leave(); break;
      case 3:
        if (!open_.empty() && below(3) == 0) close(any(open_));
        break;
      case 4:
        if (below(3) == 0) kill(device);
        break;
      case 5:
        if (!engine.up) start(device);
        break;
      case 6: engine.stopped = below(4) == 0; break;
      case 7: ask_break(device); break;
      case 8:
        clock_.advance_ms(below(2'000));
        registry_.tick();
        break;
      default: below(2) == 0 ? deliver(device) : answer(device);
    }
  }

  std::uint64_t any(const std::set<std::uint64_t>& set) {
    return *std::next(set.begin(), below(static_cast<std::uint32_t>(set.size())));
  }

  void join() {
    // Some sessions have several requests that wait, and several ranks.
    const std::uint64_t session = !open_.empty() && below(3) == 0 ? any(open_) : next_session_++;
    open_.insert(session);
    JoinRequest r = request(0, kRanks, below(6) == 0 ? "other" : "g");
    r.session_id = session;
    r.request_id = next_request_++;
    r.device = devices_of_.emplace(session, below(kDevices)).first->second;
    r.device_kind = kind_;
    r.join.rank = static_cast<std::int32_t>(below(kRanks + 1)) - 1;
    r.join.timeout_ms = 1 + below(20'000);
    owed_.insert({session, r.request_id});
    registry_.join(r);
  }

  void leave() {
    if (joined_.empty()) return;
    const auto place = std::next(joined_.begin(), below(static_cast<std::uint32_t>(joined_.size())));
    const std::uint32_t number = next_request_++;
    owed_.insert({place->first, number});
    registry_.leave(place->first, number, place->second);
    joined_.erase(place);
  }

  void close(std::uint64_t session) {
    open_.erase(session);
    const auto of_session = [session](const auto& pair) { return pair.first == session; };
    std::erase_if(joined_, of_session);
    std::erase_if(owed_, of_session);
    registry_.session_closed(session, "died");
  }

  void kill(std::uint32_t device) {
    Engine& engine = engines_[device];
    if (!engine.up) return;
    while (!engine.outbox.empty() && below(2) == 0) answer(device);  // its last words
    engine = Engine{};
    engine.up = false;
    registry_.engine_down(device, "died");
  }

  void start(std::uint32_t device) {
    engines_[device].up = true;
    registry_.engine_up(device);
  }

  void ask_break(std::uint32_t device) {
    for (const auto& [id, known] : engines_[device].groups) {
      abi::Break wanted{};
      wanted.group_id = id;
      wanted.epoch = known.epoch;
      wanted.cause = StatusCode::kDeadlineExceeded;
      engines_[device].outbox.push_back(
          [this, device, wanted] { registry_.break_requested(device, wanted); });
    }
  }

  void answer(std::uint32_t device) {
    Engine& engine = engines_[device];
    if (engine.outbox.empty()) return;
    const auto message = std::move(engine.outbox.front());
    engine.outbox.pop_front();
    message();
  }

  // Sorts what the registry wants done: to clients at once, to engines into their queues.
  void collect() {
    for (Actions actions = registry_.take_actions(); !actions.empty(); actions = registry_.take_actions()) {
      for (Action& action : actions) std::visit([this](auto& a) { sort(a); }, action);
    }
  }
  template <typename T>
  void sort(T& action) {
    Engine& engine = engines_[action.device];
    if (engine.up) engine.inbox.push_back([this, &engine, action] { obey(action.device, engine, action); });
  }
  // What is told of the group is what the supervisor knows now.
  void sort(StartGroup& action) {
    Engine& engine = engines_[action.device];
    const auto group = registry_.groups().find(action.group_id);
    if (!engine.up || group == registry_.groups().end()) return;
    KnownGroup known;
    known.phase = action.broken ? KnownGroup::Phase::kBroken : KnownGroup::Phase::kServing;
    known.epoch = group->second.epoch;
    for (const auto& [rank, member] : group->second.members) {
      known.ranks.insert(rank);
      if (member.device == action.device && member.announced) known.members.insert(rank);
    }
    engine.inbox.push_back([this, &engine, action, known] {
      ASSERT_TRUE(engine.groups.emplace(action.group_id, known).second) << "told twice";
      engine.outbox.push_back([this, action] {
        registry_.group_ready(action.device, {action.group_id, StatusCode::kOk, {}});
      });
    });
  }
  void sort(KillEngine& action) {
    if (!engines_[action.device].stopped) kill(action.device);
  }
  void sort(WakeSession&) {}
  void sort(ReplyJoined& a) {
    answered(a.session_id, a.request_id);
    if (open_.count(a.session_id) == 1) joined_.insert({a.session_id, a.message.member});
  }
  void sort(ReplyLeft& a) { answered(a.session_id, a.request_id); }
  void sort(ReplyRefused& a) { answered(a.session_id, a.request_id); }
  void answered(std::uint64_t session, std::uint32_t number) {
    if (open_.count(session) == 0) return;
    ASSERT_EQ(owed_.erase({session, number}), 1u) << "session " << session << " request " << number;
  }

  void deliver(std::uint32_t device) {
    Engine& engine = engines_[device];
    if (!engine.up || engine.stopped || engine.inbox.empty()) return;
    const auto message = std::move(engine.inbox.front());
    engine.inbox.pop_front();
    message();
  }
  KnownGroup* known_by(Engine& engine, std::uint64_t id) {
    const auto found = engine.groups.find(id);
    EXPECT_NE(found, engine.groups.end()) << "the engine knows nothing of group " << id;
    return found == engine.groups.end() ? nullptr : &found->second;
  }
  void obey(std::uint32_t, Engine& engine, const SendRank& a) {
    KnownGroup* known = known_by(engine, a.group_id);
    ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
    if (a.active_since != 0) {
      known->ranks.insert(a.rank);
    } else {
      known->ranks.erase(a.rank);
      known->members.erase(a.rank);
    }
  }
  void obey(std::uint32_t, Engine& engine, const CloseStreams& a) {
    const auto known = engine.groups.find(a.group_id);
    EXPECT_TRUE(known == engine.groups.end() || known->second.members.count(a.rank) == 0) << "it is served";
  }
  void obey(std::uint32_t, Engine& engine, const SendMember& a) {
    KnownGroup* known = known_by(engine, a.group_id);
    ASSERT_TRUE(known != nullptr && known->ranks.count(a.rank) == 1);
    known->members.insert(a.rank);
  }
  void obey(std::uint32_t device, Engine& engine, const SendStopMember& a) {
    KnownGroup* known = known_by(engine, a.message.group_id);
    ASSERT_TRUE(known != nullptr && known->members.count(a.message.rank) == 1) << "rank " << a.message.rank;
    engine.outbox.push_back([=, this] { registry_.member_stopped(device, a.message); });
  }
  void obey(std::uint32_t device, Engine& engine, const SendBreak& a) {
    KnownGroup* known = known_by(engine, a.message.group_id);
    ASSERT_TRUE(known != nullptr);
    ASSERT_TRUE(a.message.fatal != 0 || known->phase == KnownGroup::Phase::kServing) << "broken twice";
    known->phase = a.message.fatal != 0 ? KnownGroup::Phase::kLost : KnownGroup::Phase::kBroken;
    const std::uint64_t next = 10 + below(5);
    engine.outbox.push_back([=, this] {
      registry_.broken(device, {a.message.group_id, a.message.epoch, next});
    });
  }
  void obey(std::uint32_t, Engine& engine, const SendRelease& a) {
    KnownGroup* known = known_by(engine, a.message.group_id);
    ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
  }
  void obey(std::uint32_t device, Engine& engine, const SendResume& a) {
    KnownGroup* known = known_by(engine, a.message.group_id);
    ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
    ASSERT_FALSE(known->members.empty()) << "an engine without members goes on";
    ASSERT_GT(a.message.epoch, known->epoch);
    known->phase = KnownGroup::Phase::kServing;
    known->epoch = a.message.epoch;
    // What this engine believes is what the group was when it decided so; if nothing has changed since, it is
    // what the registry believes.
    const auto group = registry_.groups().find(a.message.group_id);
    if (group != registry_.groups().end() && group->second.epoch == a.message.epoch &&
        group->second.phase() == GroupPhase::kActive) {
      std::set<std::uint32_t> ranks;
      for (const auto& [rank, member] : group->second.members) ranks.insert(rank);
      EXPECT_EQ(known->ranks, ranks);
    }
    engine.outbox.push_back([=, this] { registry_.resumed(device, {a.message.group_id, a.message.epoch}); });
  }
  void obey(std::uint32_t device, Engine& engine, const SendRemoveGroup& a) {
    engine.groups.erase(a.message.group_id);
    engine.outbox.push_back([=, this] { registry_.group_removed(device, a.message); });
  }
  // Every engine runs and answers; every deadline passes.
  void settle() {
    for (int turn = 0; turn < 60; ++turn) {
      for (std::uint32_t device = 0; device < kDevices; ++device) {
        Engine& engine = engines_[device];
        engine.stopped = false;
        if (!engine.up) start(device);
        collect();
        while (!engine.inbox.empty() || !engine.outbox.empty()) {
          deliver(device);
          answer(device);
          collect();
          if (HasFatalFailure()) return;
        }
      }
      clock_.advance_ms(2'000);
      registry_.tick();
      collect();
    }
  }

  void check_settled(const Group& group) const {
    const bool at_rest = group.phase() == GroupPhase::kActive || group.phase() == GroupPhase::kLost;
    EXPECT_TRUE(at_rest) << "group " << group.id << " is stuck in phase " << static_cast<int>(group.phase());
    EXPECT_TRUE(group.waiting.empty());
    for (const auto& [rank, member] : group.members) {
      EXPECT_NE(member.presence, Presence::kJoining) << "rank " << rank;
      EXPECT_EQ(memory_.held.count({group.id, rank}), member.gone() ? 0u : 1u) << "rank " << rank;
      EXPECT_FALSE(group.phase() == GroupPhase::kActive && member.gone());
    }
    if (group.phase() != GroupPhase::kActive) return;
    for (const auto& [device, slot] : group.engines) {
      EXPECT_EQ(slot.phase(), EnginePhase::kServing);
      EXPECT_TRUE(group.needs(device));
    }
  }

  std::mt19937_64 random_;
  abi::DeviceKind kind_ = abi::DeviceKind::kHost;  // of all devices
  std::array<Engine, kDevices> engines_;
  std::uint64_t next_session_ = 10;
  std::uint32_t next_request_ = 100;
  std::set<std::uint64_t> open_;
  std::map<std::uint64_t, std::uint32_t> devices_of_;         // session -> device
  std::set<std::pair<std::uint64_t, std::uint32_t>> joined_;  // sessions, their memberships
  std::set<std::pair<std::uint64_t, std::uint32_t>> owed_;    // requests without an answer
};

class RandomDegrade : public RandomMembership, public testing::WithParamInterface<std::uint64_t> {};

TEST_P(RandomDegrade, EveryRequestIsAnsweredAndNoGroupIsStuck) {
  run(GetParam(), LossPolicy::kDegrade);
}
TEST_P(RandomDegrade, AndUnderFailFast) {
  run(GetParam(), LossPolicy::kFailFast);
}
INSTANTIATE_TEST_SUITE_P(Seeds, RandomDegrade, testing::Range<std::uint64_t>(1, 201));

}  // namespace
}  // namespace epd::membership
