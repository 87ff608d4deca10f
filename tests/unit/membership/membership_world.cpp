#include "membership_world.h"

#include <algorithm>

namespace epd::membership {
namespace {

std::optional<Spanning> spanning(bool spans, std::uint64_t& next_key) {
  if (!spans) return std::nullopt;
  return Spanning{std::uint64_t{1} << 63, 256, [&next_key] { return EpochKey{next_key++, 7}; }};
}

}  // namespace

World::World(std::uint64_t seed, const WorldOptions& options)
    : options_(options),
      random_(seed),
      registry_(clock_, {4, 60'000, 3'000, 10'000, 30'000, kLastEpoch, options.conflict_ms},
                spanning(options.spans, next_key_)) {
  while (nodes_.size() < options.nodes) begin_node();
}

void World::begin_node() {
  const auto node = static_cast<std::uint32_t>(nodes_.size());
  nodes_.emplace_back();
  NodeUp described{node, {}, "node-" + std::to_string(node), "boot"};
  const std::uint32_t devices = kDevices / options_.nodes;
  for (std::uint32_t d = 0; d < devices; ++d) described.devices.push_back({"host:" + std::to_string(d), {}});
  tell(node, described);
  for (std::uint32_t d = 0; d < devices; ++d) start({node, d});
}

// Another one takes its place.
void World::lose_node() {
  const std::uint32_t node = any_engine().node;
  for (auto session = open_.begin(); session != open_.end();) {
    const SessionId id = (session++)->first;
    if (id.node == node) forget(id);
  }
  std::erase_if(engines_, [node](const auto& entry) { return entry.first.node == node; });
  nodes_[node] = Node{};
  nodes_[node].lost = true;
  registry_.handle(NodeLost{node, "its daemon was killed"});
  collect();
  begin_node();
}

void World::say_out_of_reach(EngineId engine) {
  if (engines_.at(engine).up) tell(engine.node, PeerLost{engine, any_engine(), "no answer"});
}

void World::believe(std::uint64_t group_id, const KnownGroup& known, EpochKey key, std::uint64_t view) {
  const Believed now{known.ranks, key, view};
  const auto [found, first] = believed_.emplace(std::pair(group_id, known.epoch), now);
  EXPECT_EQ(found->second, now) << "two engines believe two things in epoch " << known.epoch;
}

EngineId World::any_engine() {
  return any(engines_)->first;
}

void World::step() {
  const EngineId engine = any_engine();
  switch (below(options_.spans ? 30 : 28)) {
    case 0:
    case 1: join(); break;
    case 2: leave(); break;
    case 3:
      if (!open_.empty() && below(3) == 0) close(any(open_)->first);
      break;
    case 4:
      if (below(3) == 0) kill(engine);
      break;
    case 5:
      if (!engines_[engine].up) start(engine);
      break;
    case 6: engines_[engine].stopped = below(4) == 0; break;
    case 7: ask_break(engine); break;
    case 8:
      clock_.advance_ms(below(2'000));
      registry_.tick();
      break;
    case 9: say_again(); break;
    case 10:
      if (below(8) == 0) evict();
      break;
    case 28:
      if (below(12) == 0) lose_node();
      break;
    case 29:
      if (below(3) == 0) say_out_of_reach(engine);
      break;
    default:
      for (int i = 0; i < 12; ++i) {
        const std::uint32_t node = below(static_cast<std::uint32_t>(nodes_.size()));
        const EngineId other = any_engine();
        switch (below(4)) {
          case 0: deliver(other); break;
          case 1: answer(other); break;
          case 2: hear(node); break;
          default: obey(node);
        }
        collect();
      }
  }
  collect();
}

// ---- clients

void World::join() {
  // Some sessions have several requests that wait, and several ranks.
  SessionId session;
  if (!open_.empty() && below(3) == 0) {
    session = any(open_)->first;
  } else {
    const EngineId engine = any_engine();
    session = {engine.node, next_session_++};
    open_[session] = engine;
  }
  JoinRequest request;
  request.id = {session, next_request_++};
  request.uid = kUid;
  request.engine = open_.at(session);
  request.device_kind = options_.kind;
  std::strcpy(request.join.group, below(6) == 0 ? "other" : "g");
  request.join.shape =
      options_.spans ? spanning_shape_of(kRanks, options_.policy) : shape_of(kRanks, options_.policy);
  request.join.rank = static_cast<std::int32_t>(below(kRanks + 1)) - 1;
  request.join.timeout_ms = 1 + below(20'000);
  owed_.insert(request.id);
  waiting_[request.id] = request;
  tell(session.node, request);
}

// As a node does that has lost its channel, and what was on it.
void World::say_again() {
  if (waiting_.empty()) return;
  const auto& request = any(waiting_)->second;
  const RequestId id = request.id;
  const Node& node = nodes_[id.session.node];
  const auto answers = [&id](const Sent& sent) {
    const auto of = [&id](const auto& action) {
      if constexpr (requires { action.request; }) return action.request == id;
      return false;
    };
    return std::visit(of, sent.action);
  };
  if (node.up.empty() && std::none_of(node.down.begin(), node.down.end(), answers)) registry_.handle(request);
}

void World::leave() {
  if (joined_.empty()) return;
  const auto place = any(joined_);
  const LeaveRequest request{{place->first, next_request_++}, place->second};
  joined_.erase(place);
  owed_.insert(request.id);
  tell(request.id.session.node, request);
}

void World::close(SessionId session) {
  forget(session);
  tell(session.node, SessionClosed{session, "died"});
}

void World::forget(SessionId session) {
  open_.erase(session);
  std::erase_if(joined_, [session](const auto& pair) { return pair.first == session; });
  std::erase_if(owed_, [session](const RequestId& request) { return request.session == session; });
  std::erase_if(waiting_, [session](const auto& entry) { return entry.first.session == session; });
}

void World::answered(const RequestId& request) {
  if (!open_.contains(request.session)) return;
  waiting_.erase(request);
  ASSERT_EQ(owed_.erase(request), 1u)
      << "session " << request.session.number << " request " << request.number;
}

void World::evict() {
  if (registry_.groups().empty()) return;
  const auto& [id, group] = *any(registry_.groups());
  registry_.handle(EvictRank{id, below(kRanks), "was evicted by operator"});
}

// ---- channels

void World::tell(std::uint32_t node, Event event) {
  nodes_[node].up.push_back(std::move(event));
  ++nodes_[node].sent;
  if (options_.at_once) hear(node);
}

void World::hear(std::uint32_t node) {
  if (nodes_[node].up.empty()) return;
  const Event event = std::move(nodes_[node].up.front());
  nodes_[node].up.pop_front();
  ++nodes_[node].heard;
  registry_.handle(event);
  // A request that has been answered would be another one.
  const bool request =
      std::holds_alternative<JoinRequest>(event) || std::holds_alternative<LeaveRequest>(event);
  if (options_.echoes && !request) registry_.handle(event);
  collect();
}

void World::collect() {
  for (Actions actions = registry_.take_actions(); !actions.empty(); actions = registry_.take_actions()) {
    for (Action& action : actions) {
      const std::uint32_t node = node_of(action);
      EXPECT_FALSE(nodes_[node].lost) << to_string(action);
      nodes_[node].down.push_back({std::move(action), nodes_[node].heard});
    }
  }
  for (std::uint32_t node = 0; options_.at_once && node < nodes_.size(); ++node) obey(node);
}

void World::obey(std::uint32_t node) {
  if (nodes_[node].down.empty()) return;
  const Sent sent = std::move(nodes_[node].down.front());
  nodes_[node].down.pop_front();
  std::visit([&](const auto& action) { carry_out(action, sent.heard); }, sent.action);
  if (options_.at_once) obey(node);
}

// ---- nodes

// An engine that has died gets nothing, nor does its successor get what was meant for it.
template <typename T>
void World::carry_out(const T& action, std::uint64_t heard) {
  Engine& engine = engines_[action.engine];
  if (engine.up && heard >= engine.known_at)
    engine.inbox.push_back([this, &engine, action] { take(engine, action); });
}

void World::carry_out(const CloseStreams& action, std::uint64_t heard) {
  EXPECT_TRUE(nodes_[action.engine.node].memory.held.contains({action.group_id, action.rank}));
  Engine& engine = engines_[action.engine];
  if (!action.later && engine.up && heard >= engine.known_at)
    engine.inbox.push_back([this, &engine, action] { take(engine, action); });
}

void World::carry_out(const KillEngine& action, std::uint64_t heard) {
  const Engine& engine = engines_[action.engine];
  if (!engine.stopped && heard >= engine.known_at) kill(action.engine);
}

void World::carry_out(const AcquireMemory& action, std::uint64_t) {
  const std::uint32_t node = action.engine.node;
  FakeMemory& memory = nodes_[node].memory;
  memory.limit = below(8) == 0 ? 0 : 1000;
  tell(node, MemoryAcquired{action.request, action.group_id, action.rank, memory.acquire(action)});
}

void World::carry_out(const ReleaseMemory& action, std::uint64_t) {
  FakeMemory& memory = nodes_[action.engine.node].memory;
  const FakeMemory::Key key(action.group_id, action.rank);
  const bool released = memory.held.erase(key) == 1;
  // The registry may give up what it has asked for before it hears that there was no room.
  EXPECT_TRUE(released || memory.refused.contains(key) || !options_.at_once) << "rank " << action.rank;
}

void World::carry_out(const MarkLost& action, std::uint64_t) {
  EXPECT_TRUE(nodes_[action.engine.node].memory.held.contains({action.group_id, action.rank}));
  const Engine& engine = engines_[action.engine];
  const auto known = engine.groups.find(action.group_id);
  EXPECT_FALSE(known != engine.groups.end() && known->second.phase == KnownGroup::Phase::kServing &&
               known->second.members.contains(action.rank))
      << "an engine writes the board of rank " << action.rank;
}

void World::carry_out(const ReplyJoined& action, std::uint64_t) {
  answered(action.request);
  if (open_.contains(action.request.session)) joined_.insert({action.request.session, action.message.member});
}

// ---- engines

void World::kill(EngineId id) {
  Engine& engine = engines_[id];
  if (!engine.up) return;
  while (!engine.outbox.empty() && below(2) == 0) answer(id);  // its last words
  engine = Engine{};
  tell(id.node, EngineDown{id, "died", nodes_[id.node].memory.boards_on(id)});
}

void World::start(EngineId id) {
  Engine& engine = engines_[id];
  engine.up = true;
  engine.known_at = nodes_[id.node].sent + 1;
  tell(id.node, EngineUp{id, options_.spans ? "address " + std::to_string(engine.known_at) : ""});
}

void World::ask_break(EngineId id) {
  for (const auto& [group, known] : engines_[id].groups) {
    BreakRequested wanted{id, {}};
    wanted.message.group_id = group;
    wanted.message.epoch = known.epoch;
    wanted.message.cause = StatusCode::kDeadlineExceeded;
    wanted.message.failed_rank = static_cast<std::int32_t>(below(4)) - 1;
    engines_[id].outbox.emplace_back(wanted);
  }
}

void World::answer(EngineId id) {
  Engine& engine = engines_[id];
  if (engine.outbox.empty()) return;
  Event event = std::move(engine.outbox.front());
  engine.outbox.pop_front();
  if (auto* ready = std::get_if<GroupReady>(&event))
    ready->boards = nodes_[id.node].memory.boards_on(id, ready->message.group_id);
  tell(id.node, std::move(event));
}

void World::deliver(EngineId id) {
  Engine& engine = engines_[id];
  if (!engine.up || engine.stopped || engine.inbox.empty()) return;
  const auto message = std::move(engine.inbox.front());
  engine.inbox.pop_front();
  message();
}

World::KnownGroup* World::known_by(Engine& engine, std::uint64_t group_id) {
  const auto found = engine.groups.find(group_id);
  EXPECT_NE(found, engine.groups.end()) << "the engine knows nothing of group " << group_id;
  return found == engine.groups.end() ? nullptr : &found->second;
}

void World::take(Engine& engine, const StartGroup& action) {
  const GroupDescription& group = action.group;
  ASSERT_EQ(group.ranks.size(), kRanks);
  KnownGroup known;
  known.phase = action.broken ? KnownGroup::Phase::kBroken : KnownGroup::Phase::kServing;
  known.epoch = group.epoch;
  for (const RankDescription& rank : group.ranks) {
    if (rank.active_since != 0) known.ranks.insert(rank.rank);
  }
  for (const MemberDescription& member : group.members) {
    EXPECT_EQ(group.ranks[member.rank].engine, action.engine);
    EXPECT_TRUE(nodes_[action.engine.node].memory.held.contains({group.label.id, member.rank}));
    known.members.insert(member.rank);
  }
  for (const FarEngine& far : group.far_engines) EXPECT_NE(far.engine.node, action.engine.node);
  if (!action.broken) believe(group.label.id, known, group.epoch_key, group.view);
  ASSERT_TRUE(engine.groups.emplace(group.label.id, known).second) << "told twice";
  // Now and then it can't use what a rank has brought, or can't serve the group at all.
  if (below(20) == 0) {
    const abi::RankRefused message{group.label.id, below(kRanks), StatusCode::kInvalidArgument, {}};
    engine.outbox.emplace_back(RankRefused{action.engine, message});
  }
  if (below(10) == 0) engine.outbox.emplace_back(GroupWaits{action.engine, {group.label.id, {}}});
  const StatusCode status = below(30) == 0 ? StatusCode::kResourceExhausted : StatusCode::kOk;
  engine.outbox.emplace_back(GroupReady{action.engine, {group.label.id, status, {}}, {}});
}

void World::take(Engine& engine, const SendRank& action) {
  KnownGroup* known = known_by(engine, action.group_id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
  if (action.rank.active_since != 0) {
    known->ranks.insert(action.rank.rank);
  } else {
    known->ranks.erase(action.rank.rank);
    known->members.erase(action.rank.rank);
  }
}

void World::take(Engine& engine, const SendMember& action) {
  KnownGroup* known = known_by(engine, action.group_id);
  ASSERT_TRUE(known != nullptr && known->ranks.contains(action.member.rank));
  known->members.insert(action.member.rank);
}

void World::take(Engine& engine, const CloseStreams& action) {
  const auto known = engine.groups.find(action.group_id);
  EXPECT_TRUE(known == engine.groups.end() || !known->second.members.contains(action.rank)) << "it is served";
}

void World::take(Engine&, const SendFarEngine& action) {
  EXPECT_NE(action.far.engine.node, action.engine.node);
  EXPECT_FALSE(action.far.address.empty());
}

void World::take(Engine& engine, const SendStopMember& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr && known->members.contains(action.message.rank))
      << "rank " << action.message.rank;
  MemberStopped stopped{action.engine, action.message};
  stopped.message.next_submit = 5 + below(5);
  engine.outbox.emplace_back(stopped);
}

void World::take(Engine& engine, const SendBreak& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr);
  ASSERT_TRUE(action.message.fatal != 0 || known->phase == KnownGroup::Phase::kServing) << "broken twice";
  known->phase = action.message.fatal != 0 ? KnownGroup::Phase::kLost : KnownGroup::Phase::kBroken;
  known->said = 10 + below(5);
  engine.outbox.emplace_back(
      Broken{action.engine, {action.message.group_id, action.message.epoch, known->said}});
}

void World::take(Engine& engine, const SendRelease& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
}

void World::take(Engine& engine, const SendResume& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
  ASSERT_FALSE(known->members.empty()) << "an engine without members goes on";
  ASSERT_GT(action.message.epoch, known->epoch);
  known->phase = KnownGroup::Phase::kServing;
  known->epoch = action.message.epoch;
  EXPECT_LE(action.message.resume_index, std::exchange(known->said, kNever)) << "an operation is left out";
  believe(action.message.group_id, *known, action.epoch_key, action.message.view);
  check_ranks(*known, action);
  engine.outbox.emplace_back(Resumed{action.engine, {action.message.group_id, action.message.epoch}});
}

// What this engine believes is what the group was when it was decided; if nothing has changed since, it is
// what the registry believes.
void World::check_ranks(const KnownGroup& known, const SendResume& action) const {
  const auto group = registry_.groups().find(action.message.group_id);
  if (group == registry_.groups().end() || group->second.epoch != action.message.epoch ||
      !group->second.is(GroupPhase::kActive))
    return;
  std::set<std::uint32_t> ranks;
  for (const auto& [rank, member] : group->second.members) ranks.insert(rank);
  EXPECT_EQ(known.ranks, ranks);
}

void World::take(Engine& engine, const SendRemoveGroup& action) {
  engine.groups.erase(action.message.group_id);
  engine.outbox.emplace_back(GroupRemoved{action.engine, action.message});
}

// ---- ends

void World::settle() {
  for (int turn = 0; turn < 60; ++turn) {
    for (auto& [id, engine] : engines_) {
      engine.stopped = false;
      if (!engine.up) start(id);
    }
    for (bool busy = true; busy;) {
      busy = false;
      for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
        busy = busy || !nodes_[node].up.empty() || !nodes_[node].down.empty();
        hear(node);
        obey(node);
      }
      for (auto& [id, engine] : engines_) {
        busy = busy || !engine.inbox.empty() || !engine.outbox.empty();
        deliver(id);
        answer(id);
      }
      collect();
      if (testing::Test::HasFatalFailure()) return;
    }
    clock_.advance_ms(2'000);
    registry_.tick();
    collect();
  }
}

void World::close_all_sessions() {
  while (!open_.empty()) close(open_.begin()->first);
}

void World::check_settled() const {
  for (const auto& [id, group] : registry_.groups()) {
    EXPECT_TRUE(group.is(GroupPhase::kActive) || group.is(GroupPhase::kLost))
        << "group " << id << " is stuck in phase " << static_cast<int>(group.phase());
    EXPECT_TRUE(group.waiting.empty());
    EXPECT_TRUE(group.arrivals.empty());
    for (const auto& [rank, member] : group.members) {
      EXPECT_NE(member.presence, Presence::kJoining) << "rank " << rank;
      const bool held = nodes_[member.engine.node].memory.held.contains({id, rank});
      EXPECT_NE(held, member.gone()) << "rank " << rank;
      EXPECT_FALSE(group.is(GroupPhase::kActive) && member.gone());
    }
    if (!group.is(GroupPhase::kActive)) continue;
    for (const auto& [engine, slot] : group.engines) {
      EXPECT_EQ(slot.phase(), EnginePhase::kServing);
      EXPECT_TRUE(group.needs(engine));
    }
  }
}

void World::check_empty() const {
  EXPECT_TRUE(registry_.groups().empty());
  for (const Node& node : nodes_) EXPECT_TRUE(node.memory.held.empty());
  for (const auto& [id, engine] : engines_) EXPECT_TRUE(engine.groups.empty());
  EXPECT_TRUE(owed_.empty()) << "a request of session "
                             << (owed_.empty() ? 0 : owed_.begin()->session.number);
  EXPECT_EQ(registry_.next_due_ns(), kNever);
}

}  // namespace epd::membership
