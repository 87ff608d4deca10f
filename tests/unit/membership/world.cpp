#include "world.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>

namespace epd::membership {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kPeerTimeoutMs = 500;
const ClusterTimes kTimes{100, 2'000, 4'000};
const MembershipLimits kLimits{8, 3'000, 1'000, 3'000, 1'000, 100'000, 0};

bool is_request(const Event& event) {
  return std::holds_alternative<JoinRequest>(event) || std::holds_alternative<LeaveRequest>(event);
}

}  // namespace

World::World(std::uint64_t seed, const WorldOptions& options)
    : options_(options), random_(seed), nodes_(options.nodes) {
  start_coordinator();
  for (std::uint32_t n = 0; n < options.nodes; ++n) {
    nodes_[n].name = "node-" + std::string(1, static_cast<char>('a' + n));
    start_node(nodes_[n]);
  }
  happen();
}

// ---- time

void World::later_us(std::uint64_t us, std::function<void()> what) {
  queue_.push({clock_.now_ns() + us * 1'000, next_happening_++, std::move(what)});
}

// EPD_TEST_VERBOSE prints what happens.
void World::trace(const std::string& line) const {
  static const bool verbose = std::getenv("EPD_TEST_VERBOSE") != nullptr;
  if (verbose) std::cout << clock_.now_ns() / 1'000 << " us " << line << "\n";
}

void World::run_ms(std::uint64_t ms) {
  run_until(clock_.now_ns() + ms * kMs);
}

void World::run_until(std::uint64_t end_ns) {
  while (!testing::Test::HasFatalFailure()) {
    std::uint64_t next = end_ns;
    if (!queue_.empty()) next = std::min(next, queue_.top().at_ns);
    if (coordinator_ != nullptr) next = std::min(next, coordinator_->next_due_ns());
    for (const Node& node : nodes_) {
      if (node.runs && !node.paused) next = std::min(next, node.deciders->next_due_ns());
    }
    next = std::max(next, clock_.now_ns());
    clock_.advance_to(next);
    if (next >= end_ns) return;
    if (!queue_.empty() && queue_.top().at_ns <= next) {
      const std::function<void()> what = queue_.top().what;
      queue_.pop();
      what();
    }
    if (coordinator_ != nullptr && coordinator_->next_due_ns() <= next) coordinator_->tick();
    for (Node& node : nodes_) {
      if (node.runs && !node.paused && node.deciders->next_due_ns() <= next) node.deciders->tick();
    }
    pump();
  }
}

// Sends the decisions of agents and coordinator on their way.
void World::pump() {
  for (Node& node : nodes_) {
    if (!node.runs) continue;
    for (Actions actions = node.deciders->take_actions(); !actions.empty();
         actions = node.deciders->take_actions()) {
      for (const Action& action : actions) {
        trace(node.name + ": " + to_string(action));
        std::visit([&](const auto& what) { carry_out(node, what); }, action);
      }
    }
    EXPECT_GE(node.agent->term(), node.term) << "a term that is over";
    node.term = node.agent->term();
    for (ToCoordinator& message : node.agent->take_messages()) node.up.messages.push_back(std::move(message));
    move_up(node);
  }
  if (coordinator_ == nullptr) return;
  for (Coordinator::Sent& sent : coordinator_->take_messages()) {
    const auto node =
        std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& n) { return n.name == sent.node; });
    if (const auto* welcome = std::get_if<Welcome>(&sent.message.body))
      counts["kept groups"] += welcome->groups.size();
    node->down.messages.push_back(std::move(sent.message));
  }
  for (Node& node : nodes_) move_down(node);
  if (!coordinator_->superseded()) return;
  ++counts["superseded"];
  kill_coordinator();
  start_coordinator();
}

// ---- channels: first in, first out, each message with a delay of its own

void World::move_up(Node& node) {
  if (node.up.moving || node.up.cut || node.up.messages.empty() || coordinator_ == nullptr) return;
  node.up.moving = true;
  later_us(50 + below(below(20) == 0 ? 50'000 : 500), [this, &node, channel = node.channel] {
    if (channel != node.channel) return;
    node.up.moving = false;
    if (node.up.cut || node.up.messages.empty() || coordinator_ == nullptr) return;
    const ToCoordinator message = std::move(node.up.messages.front());
    node.up.messages.pop_front();
    coordinator_->handle(node.name, message);
  });
}

void World::move_down(Node& node) {
  if (node.down.moving || node.down.cut || node.down.messages.empty() || !node.runs || node.paused) return;
  node.down.moving = true;
  later_us(50 + below(below(20) == 0 ? 50'000 : 500), [this, &node, channel = node.channel] {
    if (channel != node.channel) return;
    node.down.moving = false;
    if (node.down.cut || node.down.messages.empty() || !node.runs || node.paused) return;
    const ToAgent message = std::move(node.down.messages.front());
    node.down.messages.pop_front();
    node.agent->handle(message);
  });
}

void World::begin_channel(Node& node) {
  trace(node.name + ": its channel begins anew");
  ++node.channel;
  node.stale.insert(node.stale.end(), node.down.messages.begin(), node.down.messages.end());
  const bool up_cut = node.up.cut;
  const bool down_cut = node.down.cut;
  node.up = {};
  node.down = {};
  node.up.cut = up_cut;
  node.down.cut = down_cut;
  if (!node.runs || coordinator_ == nullptr) return;
  node.agent->channel_began();
  // Messages of another coordinator may still arrive.
  for (const ToAgent& message : std::exchange(node.stale, {})) {
    if (message.term == coordinator_->term()) continue;
    later_us(below(6'000'000), [this, &node, message, boot = node.boot] {
      if (node.runs && !node.paused && node.boot == boot && message.term < coordinator_term())
        node.agent->handle(message);
    });
  }
}

// ---- faults

void World::happen() {
  if (!faults_) return;
  Node& node = any_node();
  if (node.runs && !node.paused) {
    switch (below(8)) {
      case 0:
      case 1:
      case 2: join(node); break;
      case 3:
        if (below(4) == 0) leave(node);
        break;
      case 4:
        if (!node.clients.empty() && below(6) == 0) close(node, node.clients.begin()->first);
        break;
      case 5:
        if (below(8) == 0) below(2) == 0 ? evict(node) : evict_own(node);
        break;
      default: break;
    }
  }
  if (below(12) == 0) fault();
  later_us(1'000 + below(120'000), [this] { happen(); });
}

void World::fault() {
  Node& node = any_node();
  Node& other = any_node();
  const std::uint64_t a_while_us = 1'000 + below(below(2) == 0 ? 300'000 : 8'000'000);
  const auto device = static_cast<std::uint32_t>(below(options_.devices));
  if (!node.runs) return;
  Engine& engine = node.engines[device];
  switch (below(options_.coordinator_dies ? 13 : 12)) {
    case 0:
    case 1:
      if (!node.paused) kill_engine(node, device);
      break;
    case 2:
      engine.stopped = true;
      later_us(a_while_us, [this, &node, device] {
        node.engines[device].stopped = false;
        work(node, device);
      });
      break;
    case 3:
      if (below(3) == 0) kill_node(node, below(2) == 0);
      break;
    case 4:
    case 5: {
      ++counts["cuts"];
      const std::uint64_t which = below(4);
      node.up.cut = which != 0;
      node.down.cut = which != 1;
      later_us(a_while_us, [&node] { node.up.cut = node.down.cut = false; });
      break;
    }
    case 6:
      if (below(2) == 0) break;
      ++counts["pauses"];
      node.paused = true;
      later_us(a_while_us, [this, &node] {
        node.paused = false;
        for (std::uint32_t d = 0; d < options_.devices && node.runs; ++d) work(node, d);
      });
      break;
    case 7: part(node, other); break;
    case 8: begin_channel(node); break;
    case 9:
      if (below(4) != 0 || node.paused) break;
      tell(node, NodeDrains{kLocalNode, {StatusCode::kAborted, "draining"}});
      later_us(2'000'000, [this, &node, boot = node.boot] {
        if (node.boot == boot && node.runs) kill_node(node, true);
      });
      break;
    case 10:
    case 11:
      for (const auto& [id, known] : engine.groups) {
        if (node.paused || known.phase != KnownGroup::Phase::kServing) continue;
        BreakRequested wanted{{kLocalNode, device}, {}};
        wanted.message.group_id = id;
        wanted.message.epoch = known.epoch;
        wanted.message.cause = StatusCode::kDeadlineExceeded;
        wanted.message.failed_rank = static_cast<std::int32_t>(below(4)) - 1;
        say(node, device, wanted);
      }
      break;
    default:
      if (below(2) != 0 || coordinator_ == nullptr) break;
      kill_coordinator();
      later_us(below(2) == 0 ? 100'000 : 7'000'000, [this] {
        if (coordinator_ == nullptr) start_coordinator();
      });
  }
}

void World::start_node(Node& node) {
  node.runs = true;
  node.paused = false;
  node.boot = next_boot_++;
  node.evicted.clear();
  node.term = 0;
  NodeUp described{kLocalNode, {}, node.name, std::to_string(node.boot)};
  for (std::uint32_t d = 0; d < options_.devices; ++d)
    described.devices.push_back({"host:" + std::to_string(d), {}});
  MembershipLimits limits = kLimits;
  limits.conflict_ms = options_.conflict_ms;
  node.deciders = std::make_unique<Deciders>(clock_, limits, described);
  node.agent = &node.deciders->make_agent(kTimes, kLimits, described);
  begin_channel(node);
  for (std::uint32_t d = 0; d < options_.devices; ++d) start_engine(node, d);
}

void World::kill_node(Node& node, bool seen) {
  ++counts["killed nodes"];
  trace(node.name + ": killed");
  node.runs = false;
  node.clients.clear();
  node.memory = FakeMemory{};
  for (auto& [device, engine] : node.engines) {
    const std::uint64_t life = engine.life;
    engine = Engine{};
    engine.life = life + 1;
  }
  ++node.channel;
  node.up = {};
  node.down = {};
  if (seen && coordinator_ != nullptr) coordinator_->node_gone(node.name, "connecting to it is refused");
  later_us(below(5'000'000), [this, &node] {
    if (!node.runs) start_node(node);
  });
}

void World::start_coordinator() {
  coordinator_ =
      std::make_unique<Coordinator>(clock_, Coordinator::Options{kTimes, kLimits, ++last_term_, [this] {
                                                                   return EpochKey{next_key_++, 7};
                                                                 }});
  ++coordinator_life_;
  for (Node& node : nodes_) {
    later_us(1'000 + below(1'000'000), [this, &node, life = coordinator_life_] {
      if (life == coordinator_life_ && node.runs) begin_channel(node);
    });
  }
}

void World::kill_coordinator() {
  ++counts["killed coordinators"];
  last_term_ = std::max(last_term_, coordinator_->term());
  coordinator_.reset();
  ++coordinator_life_;
  for (Node& node : nodes_) begin_channel(node);
}

// Engines of the two say so; other nodes may be in its way as well.
void World::part(Node& a, Node& b) {
  if (&a == &b) return;
  ++counts["parted"];
  const auto pair = std::minmax(a.name, b.name);
  apart_.insert(pair);
  later_us(below(2) == 0 ? 100'000 : 3'000'000,
           [this, names = std::pair<std::string, std::string>(pair)] { apart_.erase(names); });
  for (auto& [device, engine] : a.engines) {
    std::set<EngineId> said;
    for (const auto& [id, known] : engine.groups) {
      for (const auto& [far, description] : known.far) {
        if (description.node == b.name && said.insert(far).second)
          say(a, device, PeerLost{{kLocalNode, device}, far, "it does not answer"});
      }
    }
  }
}

// ---- clients

void World::join(Node& node) {
  std::uint64_t session = 0;
  if (!node.clients.empty() && below(3) != 0) {
    session = std::next(node.clients.begin(), static_cast<std::ptrdiff_t>(below(node.clients.size())))->first;
  } else {
    session = next_session_++;
    node.clients[session].device = static_cast<std::uint32_t>(below(options_.devices));
  }
  Client& client = node.clients[session];
  if (client.owed.size() > 2) return;
  JoinRequest request;
  request.id = {{kLocalNode, session}, next_request_++};
  request.uid = kUid;
  request.engine = {kLocalNode, client.device};
  std::strcpy(request.join.group, below(8) == 0 ? "other" : "g");
  request.device_kind = options_.kind;
  request.join.shape = options_.spans && below(3) != 0 ? spanning_shape_of(kRanks, options_.policy)
                                                       : shape_of(kRanks, options_.policy);
  request.join.rank = below(3) == 0 ? static_cast<std::int32_t>(below(kRanks)) : -1;
  request.join.timeout_ms = static_cast<std::uint32_t>(500 + below(4'000));
  client.owed.insert(request.id.number);
  tell(node, request);
}

void World::leave(Node& node) {
  for (auto& [session, client] : node.clients) {
    if (client.members.empty() || below(2) == 0) continue;
    const std::uint32_t member = *client.members.begin();
    client.members.erase(member);
    client.owed.insert(next_request_);
    tell(node, LeaveRequest{{{kLocalNode, session}, next_request_++}, member});
    return;
  }
}

void World::close(Node& node, std::uint64_t session) {
  node.clients.erase(session);
  tell(node, SessionClosed{{kLocalNode, session}, "died"});
}

void World::evict(Node& node) {
  const auto& groups = node.agent->groups();
  if (groups.empty()) return;
  const auto& [id, group] = *std::next(groups.begin(), static_cast<std::ptrdiff_t>(below(groups.size())));
  if (group.members.empty()) return;
  const Member member = group.members.begin()->second;
  if (!node.agent->evict({id, member.rank, "was evicted"}).ok()) return;
  ++counts["evictions"];
  trace(node.name + ": rank " + std::to_string(member.rank) + " is evicted");
  node.evicted.push_back({id, member.rank, member.join_id()});
}

void World::evict_own(Node& node) {
  if (node.deciders->local().groups().empty()) return;
  const std::uint64_t id = node.deciders->local().groups().begin()->first;
  (void)node.deciders->evict({id, static_cast<std::uint32_t>(below(kRanks)), "was evicted by operator"});
}

// This holds whatever its coordinator did.
void World::check_evicted(const Node& node) const {
  for (const Evicted& evicted : node.evicted) {
    const auto group = node.agent->groups().find(evicted.group);
    if (group == node.agent->groups().end()) continue;
    const auto member = group->second.members.find(evicted.rank);
    if (member == group->second.members.end() || member->second.gone()) continue;
    const bool same = member->second.session.number == evicted.join.session.number &&
                      member->second.join_request == evicted.join.number;
    EXPECT_FALSE(same && member->second.evicted.empty() && !group->second.failed)
        << node.name << ": rank " << evicted.rank << " of group " << evicted.group << " was evicted";
  }
}

void World::answered(Node& node, const RequestId& request) {
  const auto client = node.clients.find(request.session.number);
  if (client == node.clients.end()) return;
  ASSERT_EQ(client->second.owed.erase(request.number), 1u)
      << "session " << client->first << " request " << request.number;
}

// ---- nodes

void World::tell(Node& node, const Event& event) {
  trace(node.name + " tells event " + std::to_string(event.index()));
  node.deciders->handle(event);
  if (options_.echoes && !is_request(event)) node.deciders->handle(event);
}

void World::carry_out(Node& node, const CloseStreams& action) {
  EXPECT_TRUE(node.memory.held.contains({action.group_id, action.rank}));
  Engine& engine = node.engines[action.engine.device];
  if (action.later || !engine.up) return;
  engine.inbox.push_back([this, &node, &engine, action] { take(node, engine, action); });
  work(node, action.engine.device);
}

template <typename T>
void World::carry_out(Node& node, const T& action) {
  const std::uint32_t device = action.engine.device;
  Engine& engine = node.engines[device];
  if (!engine.up) return;
  if constexpr (std::is_same_v<T, StartGroup>) {
    for (const MemberDescription& member : action.group.members)
      EXPECT_TRUE(node.memory.held.contains({action.group.label.id, member.rank}));
  }
  engine.inbox.push_back([this, &node, &engine, action] { take(node, engine, action); });
  work(node, device);
}

void World::carry_out(Node& node, const KillEngine& action) {
  if (!node.engines[action.engine.device].stopped) kill_engine(node, action.engine.device);
}

void World::carry_out(Node& node, const AcquireMemory& action) {
  node.memory.limit = below(20) == 0 ? 0 : 1000;
  tell(node, MemoryAcquired{action.request, action.group_id, action.rank, node.memory.acquire(action)});
}

void World::carry_out(Node& node, const ReleaseMemory& action) {
  node.memory.held.erase({action.group_id, action.rank});
}

void World::carry_out(Node& node, const MarkLost& action) {
  EXPECT_TRUE(node.memory.held.contains({action.group_id, action.rank}));
  const auto& groups = node.engines[action.engine.device].groups;
  const auto known = groups.find(action.group_id);
  EXPECT_FALSE(known != groups.end() && known->second.phase == KnownGroup::Phase::kServing &&
               known->second.members.contains(action.rank))
      << "an engine writes the board of rank " << action.rank;
}

void World::carry_out(Node& node, const ReplyJoined& action) {
  answered(node, action.request);
  ++counts["joined"];
  const auto client = node.clients.find(action.request.session.number);
  if (client == node.clients.end()) return;
  EXPECT_TRUE(node.memory.held.contains({action.message.group_id, action.message.rank}));
  EXPECT_TRUE(client->second.members.insert(action.message.member).second) << "two memberships of one number";
}

// ---- engines

void World::start_engine(Node& node, std::uint32_t device) {
  Engine& engine = node.engines[device];
  engine.up = true;
  ++engine.life;
  engine.address = node.name + "/" + std::to_string(device) + "/" + std::to_string(node.boot) + "/" +
                   std::to_string(engine.life);
  tell(node, EngineUp{{kLocalNode, device}, engine.address});
}

void World::kill_engine(Node& node, std::uint32_t device) {
  Engine& engine = node.engines[device];
  if (!engine.up || !node.runs) return;
  ++counts["killed engines"];
  trace(engine.address + ": killed");
  const std::uint64_t life = engine.life;
  engine = Engine{};
  engine.life = life;
  tell(node, EngineDown{{kLocalNode, device}, "died", node.memory.boards_on({0, device})});
  later_us(10'000 + below(400'000), [this, &node, device, boot = node.boot] {
    if (node.runs && node.boot == boot && !node.engines[device].up) start_engine(node, device);
  });
}

// Takes and says one message each time.
void World::work(Node& node, std::uint32_t device) {
  later_us(20 + below(below(10) == 0 ? 100'000 : 300),
           [this, &node, device, life = node.engines[device].life] {
             Engine& engine = node.engines[device];
             if (!node.runs || node.paused || engine.stopped || engine.life != life || !engine.up) return;
             if (!engine.inbox.empty()) {
               const auto message = std::move(engine.inbox.front());
               engine.inbox.pop_front();
               message();
             }
             if (!engine.outbox.empty()) {
               const Event event = std::move(engine.outbox.front());
               engine.outbox.pop_front();
               tell(node, event);
             }
             if (!engine.inbox.empty() || !engine.outbox.empty()) work(node, device);
           });
}

void World::say(Node& node, std::uint32_t device, Event event) {
  node.engines[device].outbox.push_back(std::move(event));
  work(node, device);
}

World::KnownGroup* World::known_by(Engine& engine, std::uint64_t group_id) {
  const auto found = engine.groups.find(group_id);
  EXPECT_NE(found, engine.groups.end()) << engine.address << " knows nothing of group " << group_id;
  return found == engine.groups.end() ? nullptr : &found->second;
}

void World::believe(const Node& node, std::uint64_t group_id, const KnownGroup& known) {
  const Believed now{known.ranks, known.key, known.view};
  const std::string group =
      std::to_string(group_id) + (is_spanning(group_id) ? "" : " of " + std::to_string(node.boot));
  const auto [found, first] = believed_.emplace(std::pair(group, known.epoch), now);
  EXPECT_EQ(found->second, now) << "two views in epoch " << known.epoch << " of group " << group_id;
}

bool World::answers(const FarEngine& far, std::uint64_t group_id, const KnownGroup& known) const {
  for (const Node& node : nodes_) {
    if (node.name != far.node || !node.runs || node.paused) continue;
    for (const auto& [device, engine] : node.engines) {
      if (engine.address != far.address || !engine.up || engine.stopped) continue;
      const auto there = engine.groups.find(group_id);
      return there != engine.groups.end() && there->second.phase == KnownGroup::Phase::kServing &&
             there->second.epoch == known.epoch && there->second.key == known.key;
    }
  }
  return false;
}

// Says hello until all far engines have answered; then the group serves its epoch.
void World::greet(Node& node, std::uint32_t device, std::uint64_t group_id) {
  Engine& engine = node.engines[device];
  later_us(20'000,
           [this, &node, device, group_id, life = engine.life, epoch = engine.groups.at(group_id).epoch] {
             Engine& mine = node.engines[device];
             const auto found = mine.groups.find(group_id);
             if (mine.life != life || !mine.up || found == mine.groups.end()) return;
             KnownGroup& known = found->second;
             if (known.epoch != epoch || known.phase != KnownGroup::Phase::kServing || known.greeted) return;
             if (node.paused || mine.stopped) return greet(node, device, group_id);
             const FarEngine* missing = nullptr;
             for (const auto& [rank, at] : known.ranks) {
               const auto far = known.far.find(at);
               if (far == known.far.end()) continue;
               if (apart(node.name, far->second.node) || !answers(far->second, group_id, known))
                 missing = &far->second;
             }
             if (missing == nullptr) {
               known.greeted = true;
               ++counts["epochs served"];
               if (known.epoch == 1) {
                 const bool fails = !is_spanning(group_id) && below(30) == 0;
                 const StatusCode status = fails ? StatusCode::kResourceExhausted : StatusCode::kOk;
                 say(node, device,
                     GroupReady{{kLocalNode, device},
                                {group_id, status, {}},
                                node.memory.boards_on({kLocalNode, device}, group_id)});
               } else {
                 say(node, device, Resumed{{kLocalNode, device}, {group_id, known.epoch}});
               }
               return;
             }
             if (clock_.now_ns() - known.waits_since_ns > kPeerTimeoutMs * kMs) {
               known.waits_since_ns = clock_.now_ns();
               say(node, device, GroupWaits{{kLocalNode, device}, {group_id, {}}});
               if (known.epoch != 1)
                 say(node, device, PeerLost{{kLocalNode, device}, missing->engine, "no hello"});
             }
             greet(node, device, group_id);
           });
}

void World::take(Node& node, Engine& engine, const StartGroup& action) {
  const GroupDescription& group = action.group;
  const std::uint32_t device = action.engine.device;
  ASSERT_EQ(group.ranks.size(), kRanks);
  KnownGroup known;
  known.phase = action.broken ? KnownGroup::Phase::kBroken : KnownGroup::Phase::kServing;
  known.epoch = group.epoch;
  known.view = group.view;
  known.key = group.epoch_key;
  known.resume_index = group.resume_index;
  known.waits_since_ns = clock_.now_ns();
  for (const RankDescription& rank : group.ranks) {
    if (rank.active_since != 0) known.ranks[rank.rank] = rank.engine;
  }
  for (const MemberDescription& member : group.members) {
    EXPECT_EQ(known.ranks.at(member.rank), action.engine);
    known.members.insert(member.rank);
  }
  for (const FarEngine& far : group.far_engines) known.far[far.engine] = far;
  const std::uint64_t id = group.label.id;
  ASSERT_TRUE(engine.groups.emplace(id, known).second) << "told twice";
  ++counts["starts"];
  if (below(40) == 0) {
    const abi::RankRefused message{
        id, static_cast<std::uint32_t>(below(kRanks)), StatusCode::kInvalidArgument, {}};
    engine.groups.at(id).refused.insert(message.rank);
    say(node, device, RankRefused{{kLocalNode, device}, message});
  }
  if (action.broken) {
    say(node, device,
        GroupReady{
            {kLocalNode, device}, {id, StatusCode::kOk, {}}, node.memory.boards_on(action.engine, id)});
  } else {
    believe(node, id, known);
    greet(node, device, id);
  }
}

void World::take(Node&, Engine& engine, const SendRank& action) {
  KnownGroup* known = known_by(engine, action.group_id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
  if (action.rank.active_since != 0) {
    known->ranks[action.rank.rank] = action.rank.engine;
  } else {
    known->ranks.erase(action.rank.rank);
    known->members.erase(action.rank.rank);
  }
}

void World::take(Node&, Engine& engine, const SendMember& action) {
  KnownGroup* known = known_by(engine, action.group_id);
  ASSERT_TRUE(known != nullptr && known->ranks.contains(action.member.rank));
  known->members.insert(action.member.rank);
}

void World::take(Node&, Engine& engine, const CloseStreams& action) {
  const auto known = engine.groups.find(action.group_id);
  EXPECT_TRUE(known == engine.groups.end() || !known->second.members.contains(action.rank) ||
              known->second.refused.contains(action.rank))
      << "it is served";
}

void World::take(Node& node, Engine& engine, const SendFarEngine& action) {
  EXPECT_NE(action.far.node, node.name);
  for (auto& [id, known] : engine.groups) known.far[action.far.engine] = action.far;
}

void World::take(Node& node, Engine& engine, const SendStopMember& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr && known->members.contains(action.message.rank));
  MemberStopped stopped{{kLocalNode, action.engine.device}, action.message};
  stopped.message.next_submit = known->resume_index + below(5);
  say(node, action.engine.device, stopped);
}

void World::take(Node& node, Engine& engine, const SendBreak& action) {
  const std::uint64_t id = action.message.group_id;
  KnownGroup* known = known_by(engine, id);
  ASSERT_TRUE(known != nullptr);
  const bool fatal = action.message.fatal != 0;
  ASSERT_TRUE(fatal || known->phase == KnownGroup::Phase::kServing) << "broken twice";
  known->phase = fatal ? KnownGroup::Phase::kLost : KnownGroup::Phase::kBroken;
  known->said = known->resume_index + below(5);
  for (const std::uint32_t rank : known->members) node.memory.board_index[{id, rank}] = known->said;
  ++counts[fatal ? "fatal breaks" : "breaks"];
  say(node, action.engine.device,
      Broken{{kLocalNode, action.engine.device}, {id, action.message.epoch, known->said}});
}

void World::take(Node&, Engine& engine, const SendRelease& action) {
  KnownGroup* known = known_by(engine, action.message.group_id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
}

void World::take(Node& node, Engine& engine, const SendResume& action) {
  const std::uint64_t id = action.message.group_id;
  KnownGroup* known = known_by(engine, id);
  ASSERT_TRUE(known != nullptr && known->phase == KnownGroup::Phase::kBroken);
  ASSERT_FALSE(known->members.empty()) << "an engine without members goes on";
  ASSERT_GT(action.message.epoch, known->epoch);
  EXPECT_LE(action.message.resume_index, std::exchange(known->said, kNever)) << "an operation is left out";
  known->phase = KnownGroup::Phase::kServing;
  known->epoch = action.message.epoch;
  known->resume_index = action.message.resume_index;
  known->view = action.message.view;
  known->key = action.epoch_key;
  known->greeted = false;
  known->waits_since_ns = clock_.now_ns();
  for (const auto& [rank, at] : known->ranks)
    EXPECT_TRUE(at.node == action.engine.node || known->far.contains(at)) << "rank " << rank << " is nowhere";
  ++counts["resumes"];
  believe(node, id, *known);
  greet(node, action.engine.device, id);
}

void World::take(Node& node, Engine& engine, const SendRemoveGroup& action) {
  engine.groups.erase(action.message.group_id);
  say(node, action.engine.device, GroupRemoved{{kLocalNode, action.engine.device}, action.message});
}

// ---- ends

void World::settle_ms(std::uint64_t ms) {
  faults_ = false;
  apart_.clear();
  if (coordinator_ == nullptr) start_coordinator();
  for (Node& node : nodes_) {
    node.paused = node.up.cut = node.down.cut = false;
    if (!node.runs) start_node(node);
    for (std::uint32_t d = 0; d < options_.devices; ++d) {
      node.engines[d].stopped = false;
      work(node, d);
    }
  }
  run_ms(ms);
}

void World::evict_as_the_coordinator_dies() {
  for (Node& node : nodes_) evict(node);
  kill_coordinator();
}

void World::close_all_sessions() {
  for (Node& node : nodes_) {
    while (!node.clients.empty()) close(node, node.clients.begin()->first);
  }
}

void World::check_registry(const Node& node) {
  for (const auto& [id, group] : node.deciders->local().groups()) {
    EXPECT_TRUE(group.is(GroupPhase::kActive) || group.is(GroupPhase::kLost))
        << "group " << id << " is stuck in phase " << static_cast<int>(group.phase()) << group.waits();
    EXPECT_TRUE(group.arrivals.empty() && group.waiting.empty());
    for (const auto& [rank, member] : group.members) {
      EXPECT_NE(member.presence, Presence::kJoining) << "rank " << rank;
      EXPECT_NE(node.memory.held.contains({id, rank}), member.gone()) << "rank " << rank;
      EXPECT_FALSE(group.is(GroupPhase::kActive) && member.gone());
    }
    for (const auto& [engine, slot] : group.engines) {
      if (!group.is(GroupPhase::kActive)) continue;
      EXPECT_EQ(slot.phase(), EnginePhase::kServing);
      EXPECT_TRUE(group.needs(engine));
    }
  }
}

void World::check_settled() const {
  for (const auto& [id, group] : coordinator_->groups()) {
    EXPECT_TRUE(group.is(GroupPhase::kActive) || group.is(GroupPhase::kLost))
        << "group " << id << " is stuck in phase " << static_cast<int>(group.phase()) << group.waits();
    EXPECT_TRUE(group.arrivals.empty() && group.waiting.empty());
    if (!group.is(GroupPhase::kActive)) continue;
    for (const auto& [rank, member] : group.members) EXPECT_EQ(member.presence, Presence::kHere);
  }
  for (const Node& node : nodes_) {
    EXPECT_TRUE(node.agent->attached()) << node.name;
    check_registry(node);
    check_evicted(node);
    for (const auto& [session, client] : node.clients)
      EXPECT_TRUE(client.owed.empty())
          << "session " << session << " waits for request " << *client.owed.begin();
    for (const auto& [device, engine] : node.engines) {
      for (const auto& [id, known] : engine.groups) {
        EXPECT_NE(known.phase, KnownGroup::Phase::kBroken) << "group " << id;
        EXPECT_TRUE(known.phase == KnownGroup::Phase::kLost || known.greeted) << "group " << id;
        const auto& groups = is_spanning(id) ? coordinator_->groups() : node.deciders->local().groups();
        EXPECT_TRUE(known.phase == KnownGroup::Phase::kLost || groups.contains(id)) << "group " << id;
      }
    }
  }
}

void World::check_empty() const {
  EXPECT_TRUE(coordinator_->groups().empty());
  for (const Node& node : nodes_) {
    EXPECT_TRUE(node.agent->groups().empty()) << node.name;
    EXPECT_TRUE(node.agent->ended().empty()) << node.name;
    EXPECT_TRUE(node.deciders->local().groups().empty()) << node.name;
    EXPECT_EQ(node.deciders->local().next_due_ns(), kNever);
    EXPECT_TRUE(node.memory.held.empty()) << node.name;
    for (const auto& [device, engine] : node.engines) EXPECT_TRUE(engine.groups.empty()) << engine.address;
  }
}

}  // namespace epd::membership
