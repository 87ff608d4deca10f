#include "membership/coordinator.h"

#include "adoption.h"

#include <algorithm>
#include <set>
#include <utility>

namespace epd::membership {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint32_t kMaxNumber = 1u << 30;  // of nodes; 1 follows
// A node that has not brought an engine down this long after the first order to kill it is lost. An engine
// that is stopped may resume before.
constexpr std::uint64_t kKillMs = 60'000;
constexpr std::size_t kMostWaiting = 4096;  // things that one node says before all have reported
// The most by which a term may exceed the coordinator's. A higher one is not believed.
constexpr std::uint64_t kMaxTermStep = std::uint64_t{1} << 40;

// The upper half of the ids of spanning groups: each coordinator has its own.
std::uint64_t id_prefix(std::uint64_t term) {
  return (std::uint64_t{1} << 31) | (term & 0x7fff'ffff);
}

// Events of these two kinds come from the coordinator itself, never from a node.
bool is_of_node(const Event& event) {
  return !std::holds_alternative<NodeUp>(event) && !std::holds_alternative<NodeLost>(event);
}

// The device of its engine; null: it has none, or is a join, which is judged where it is answered.
const std::uint32_t* device_of(const Event& event) {
  const auto device = [](const auto& e) -> const std::uint32_t* {
    if constexpr (std::is_same_v<std::decay_t<decltype(e)>, JoinRequest>) return nullptr;
    if constexpr (requires { e.engine; }) return &e.engine.device;
    return nullptr;
  };
  return std::visit(device, event);
}

}  // namespace

Coordinator::Coordinator(const Clock& clock, Options options)
    : clock_(clock),
      options_(std::move(options)),
      term_(options_.first_term),
      open_ns_(clock.now_ns() + options_.times.node_timeout_ms * kMs),
      beat_ns_(clock.now_ns()) {}

Coordinator::~Coordinator() = default;

const std::map<std::uint64_t, Group>& Coordinator::groups() const {
  static const std::map<std::uint64_t, Group> kNone;
  return registry_ == nullptr ? kNone : registry_->groups();
}

void Coordinator::send(const std::string& name, const NodeEntry& node, decltype(ToAgent::body) body) {
  messages_.push_back({name, {term_, node.number, std::move(body)}});
}

std::vector<Coordinator::Sent> Coordinator::take_messages() {
  if (superseded_) messages_.clear();
  return std::exchange(messages_, {});
}

template <typename Test>
void Coordinator::forget(const Test& test) {
  std::erase_if(addresses_, [&test](const auto& entry) { return test(entry.second); });
  std::erase_if(kills_, [&test](const auto& entry) { return test(entry.first); });
}

// ---- what agents say

void Coordinator::handle(const std::string& name, ToCoordinator message) {
  if (superseded_ || (message.term > term_ && message.term - term_ > kMaxTermStep)) return;
  if (listening()) {
    term_ = std::max(term_, message.term + 1);
  } else if (message.term > term_) {
    superseded_ = true;
    return;
  }
  if (const auto* attached = std::get_if<Attach>(&message.body)) {
    attach(name, *attached, message.term);
    return;
  }
  const auto found = nodes_.find(name);
  if (found == nodes_.end()) {
    const bool says = !listening() && !std::holds_alternative<Superseded>(message.body);
    if (says) send(name, NodeEntry{}, PutOut{"the coordinator does not know it"});
    return;
  }
  NodeEntry& node = found->second;
  if (listening()) {
    node.heard_ns = clock_.now_ns();
    if (std::holds_alternative<Told>(message.body)) keep_for_later(found, std::move(message));
  } else {
    take(name, node, message);
  }
}

void Coordinator::keep_for_later(std::map<std::string, NodeEntry>::iterator at, ToCoordinator message) {
  auto& [name, node] = *at;
  if (node.waiting.size() < kMostWaiting) {
    node.waiting.push_back(std::move(message));
    return;
  }
  send(name, node,
       PutOut{"it has said more than " + std::to_string(kMostWaiting) +
              " things while the coordinator hears what the nodes have"});
  nodes_.erase(at);
}

void Coordinator::take(const std::string& name, NodeEntry& node, const ToCoordinator& message) {
  if (node.state != NodeEntry::State::kUp) {
    send(name, node, PutOut{node.text});
    return;
  }
  const auto* beat = std::get_if<AgentHeartbeat>(&message.body);
  if (beat == nullptr || beat->hears) node.heard_ns = clock_.now_ns();
  const auto* told = std::get_if<Told>(&message.body);
  if (told == nullptr) return;
  ++node.heard;
  if (!may_say(node, told->event)) return;
  if (std::holds_alternative<NodeDrains>(told->event)) node.drains = true;
  Event event = told->event;
  set_node(event, node.number);
  if (const auto* up = std::get_if<EngineUp>(&event); up != nullptr && !take_address(*up)) return;
  if (const auto* down = std::get_if<EngineDown>(&event))
    forget([down](EngineId e) { return e == down->engine; });
  if (auto* join = std::get_if<JoinRequest>(&event)) {
    if (Status status = check_user(name, join->uid); !status.ok()) {
      send(name, node, Order{node.heard, ReplyRefused{join->id, std::move(status)}});
      return;
    }
    const Quota own = options_.most_groups_of ? options_.most_groups_of(join->uid) : Quota();
    if (own.limit < join->max_groups.limit) join->max_groups = own;
  }
  tell(std::move(event));
}

Status Coordinator::check_user(const std::string& name, std::uint32_t uid) const {
  return options_.check_user ? options_.check_user(name, uid) : Status();
}

// A node may report only its own devices, and evict only its own ranks.
bool Coordinator::may_say(const NodeEntry& node, const Event& event) const {
  if (const auto* evicted = std::get_if<EvictRank>(&event)) {
    const auto group = groups().find(evicted->group_id);
    return group != groups().end() && group->second.lives(evicted->rank) &&
           group->second.members.at(evicted->rank).engine.node == node.number;
  }
  const std::uint32_t* device = device_of(event);
  return is_of_node(event) && (device == nullptr || *device < node.attach.devices.size());
}

void Coordinator::tell(Event event) {
  registry_->handle(event);
  carry_out();
}

// An address leads to one engine. A node that claims the address of another node's engine would take that
// engine's messages, so the claim is dropped. An engine without an address can't be reached.
bool Coordinator::take_address(const EngineUp& up) {
  const auto found = addresses_.find(up.address);
  if (found != addresses_.end() && found->second.node != up.engine.node) return false;
  std::erase_if(addresses_, [&up](const auto& entry) { return entry.second == up.engine; });
  if (!up.address.empty()) addresses_[up.address] = up.engine;
  return true;
}

// An engine that cannot be killed would hold up its groups for ever. An order is repeated after
// engine_ack_ms; if none comes for a while, the engine has answered.
void Coordinator::note_kill(EngineId engine) {
  const auto name = names_.find(engine.node);
  if (name == names_.end()) return;
  const std::uint64_t now = clock_.now_ns();
  Kills& kills = kills_.try_emplace(engine, Kills{now, now}).first->second;
  if (now - kills.last_ns > 3 * options_.limits.engine_ack_ms * kMs) kills.first_ns = now;
  kills.last_ns = now;
  if (now - kills.first_ns < kKillMs * kMs) return;
  const std::string held = name->second;
  lose(held, nodes_.at(held),
       "the engine of its device " + std::to_string(engine.device) +
           " was to be killed, and is not down after " + std::to_string(kKillMs / 1000) + " s");
}

void Coordinator::carry_out() {
  std::vector<EngineId> killed;
  for (Actions actions = registry_->take_actions(); !actions.empty(); actions = registry_->take_actions()) {
    for (Action& action : actions) {
      const auto name = names_.find(node_of(action));
      if (name == names_.end()) continue;
      const NodeEntry& node = nodes_.at(name->second);
      if (const auto* kill = std::get_if<KillEngine>(&action)) killed.push_back(kill->engine);
      send(name->second, node, Order{node.heard, std::move(action)});
    }
  }
  for (const EngineId engine : killed) note_kill(engine);
}

// ---- nodes

void Coordinator::attach(const std::string& name, const Attach& message, std::uint64_t term) {
  NodeEntry& node = nodes_[name];
  if (node.state == NodeEntry::State::kUp)
    lose(name, node,
         node.attach.boot == message.boot ? "its channel was opened again" : "its daemon was restarted");
  node.state = NodeEntry::State::kReporting;
  node.since_ns = node.heard_ns = clock_.now_ns();
  node.attach = message;
  if (node.attach.number > kMaxNumber) node.attach.number = 0;
  node.attach_term = term;
  node.drains = message.drains;
  node.heard = 0;
  node.waiting.clear();
  if (listening()) return;
  node.attach.groups = {};
  node.number = next_number(message.number);
  admit(name, node);
  send(name, node, Welcome{message.attempt, {}});
  carry_out();
}

// Tells the registry of the node. The registry's actions are sent later, after Welcome.
void Coordinator::admit(const std::string& name, NodeEntry& node) {
  node.state = NodeEntry::State::kUp;
  names_[node.number] = name;
  const std::string address = options_.address_of ? options_.address_of(name) : "";
  registry_->handle(NodeUp{node.number, node.attach.devices, name, node.attach.boot, address});
  for (const EngineReport& engine : node.attach.engines) {
    const EngineUp up{{node.number, engine.device}, engine.address};
    if (may_say(node, up) && take_address(up)) registry_->handle(up);
  }
}

void Coordinator::lose(const std::string& name, NodeEntry& node, const std::string& how) {
  node.state = NodeEntry::State::kLost;
  node.since_ns = clock_.now_ns();
  node.text = how;
  names_.erase(node.number);
  forget([&node](EngineId engine) { return engine.node == node.number; });
  send(name, node, PutOut{how});
  tell(NodeLost{node.number, how});
}

// Forgets nodes that were lost long ago. Such a node is told to attach again when it speaks.
void Coordinator::forget_lost() {
  const std::uint64_t now = clock_.now_ns();
  std::erase_if(nodes_, [now](const auto& entry) {
    const NodeEntry& node = entry.second;
    return node.state == NodeEntry::State::kLost && now - node.since_ns >= kLostNodeMs * kMs;
  });
  std::multimap<std::uint64_t, std::string> lost;  // by when
  for (const auto& [name, node] : nodes_) {
    if (node.state == NodeEntry::State::kLost) lost.emplace(node.since_ns, name);
  }
  for (auto oldest = lost.begin(); lost.size() > kMaxLostNodes; oldest = lost.erase(oldest))
    nodes_.erase(oldest->second);
}

void Coordinator::node_gone(const std::string& name, const std::string& how) {
  const auto found = nodes_.find(name);
  if (superseded_ || found == nodes_.end()) return;
  if (listening()) {
    nodes_.erase(found);
  } else if (found->second.state == NodeEntry::State::kUp) {
    lose(name, found->second, how);
  }
}

// ---- the beginning

// Returns the ids of groups that reports name, which no new group may get, and moves next_number_ above the
// numbers of nodes in the reports. An earlier coordinator may have had the same prefix, or a node may claim
// so.
std::set<std::uint64_t> Coordinator::begin_beyond_reports() {
  std::set<std::uint64_t> taken;
  for (const auto& [name, node] : nodes_) {
    for (const GroupReport& report : node.attach.groups) {
      if (report.told.label.id >> 32 == id_prefix(term_)) taken.insert(report.told.label.id);
      for (const RankDescription& rank : report.told.ranks) {
        if (rank.engine.node <= kMaxNumber) next_number_ = std::max(next_number_, rank.engine.node + 1);
      }
    }
  }
  return taken;
}

bool Coordinator::is_in_use(std::uint32_t number) const {
  const bool of_node = std::any_of(nodes_.begin(), nodes_.end(),
                                   [number](const auto& entry) { return entry.second.number == number; });
  return of_node || std::any_of(groups().begin(), groups().end(), [number](const auto& entry) {
           const auto& engines = entry.second.engines;
           return std::any_of(engines.begin(), engines.end(),
                              [number](const auto& engine) { return engine.first.node == number; });
         });
}

// A node may have claimed a high number, so 1 follows the last. A node never gets its former number: that
// would tell it that its groups might continue.
std::uint32_t Coordinator::next_number(std::uint32_t former) {
  std::uint32_t number = former;
  while (number == former || is_in_use(number)) {
    if (next_number_ > kMaxNumber) next_number_ = 1;
    number = next_number_++;
  }
  return number;
}

// A node of an adopted group keeps its number. Any other node keeps its number if it is free.
void Coordinator::open() {
  std::set<std::uint64_t> taken = begin_beyond_reports();
  registry_ = std::make_unique<GroupRegistry>(
      clock_, options_.limits,
      Spanning{id_prefix(term_) << 32 | 1, kFirstSpanningIndex, options_.new_epoch_key, std::move(taken)});
  Adoption adoption;
  std::uint32_t index = 0;
  for (auto& [name, node] : nodes_) {
    const Adoption::Reporter reporter{index++, node.attach.number, node.attach_term,
                                      node.attach.devices.size()};
    for (const GroupReport& report : std::exchange(node.attach.groups, {})) {
      if (check_user(name, report.told.label.uid).ok()) adoption.add(reporter, report);
    }
  }
  Adoption::Adopted adopted = adoption.take(options_.limits.max_groups);
  index = 0;
  for (auto& [name, node] : nodes_) {
    const auto kept = adopted.numbers.find(index++);
    if (kept != adopted.numbers.end()) node.number = kept->second;
  }
  for (auto& [name, node] : nodes_) {
    if (node.number == 0 && node.attach.number != 0 && !is_in_use(node.attach.number))
      node.number = node.attach.number;
    next_number_ = std::max(next_number_, node.number + 1);
  }
  for (auto& [name, node] : nodes_) {
    if (node.number == 0) node.number = next_number(node.attach.number);
  }
  // Nodes of adopted groups come first: their numbers and addresses are known to be right.
  for (const bool known : {true, false}) {
    index = 0;
    for (auto& [name, node] : nodes_) {
      if (adopted.numbers.contains(index++) == known) admit(name, node);
    }
  }
  std::map<std::uint32_t, std::vector<std::uint64_t>> stay = adopt(std::move(adopted.groups));
  for (auto& [name, node] : nodes_) {
    send(name, node, Welcome{node.attach.attempt, std::move(stay[node.number])});
    node.heard_ns = clock_.now_ns();
  }
  carry_out();
  for (auto& [name, node] : nodes_) {
    for (const ToCoordinator& message : std::exchange(node.waiting, {})) take(name, node, message);
  }
}

// Returns, for each node, the groups that it takes part in.
std::map<std::uint32_t, std::vector<std::uint64_t>> Coordinator::adopt(std::vector<Group> groups) {
  std::map<std::uint32_t, std::vector<std::uint64_t>> stay;
  for (Group& group : groups) {
    std::set<std::uint32_t> nodes;
    for (const auto& [engine, slot] : group.engines) nodes.insert(engine.node);
    for (const std::uint32_t node : nodes) stay[node].push_back(group.id);
    group.created_ns = clock_.now_ns();
    registry_->adopt(std::move(group));
  }
  return stay;
}

// ---- time

void Coordinator::tick() {
  const std::uint64_t now = clock_.now_ns();
  if (superseded_) return;
  if (listening() && now >= open_ns_) open();
  if (superseded_) return;
  if (beat_ns_ <= now) {
    beat_ns_ = now + options_.times.heartbeat_ms * kMs;
    for (const auto& [name, node] : nodes_) {
      if (node.state != NodeEntry::State::kLost) send(name, node, CoordinatorHeartbeat{});
    }
  }
  if (listening()) return;
  for (auto& [name, node] : nodes_) {
    if (node.state == NodeEntry::State::kUp && now - node.heard_ns > options_.times.node_timeout_ms * kMs)
      lose(name, node, "silent for " + std::to_string(options_.times.node_timeout_ms) + " ms");
  }
  forget_lost();
  registry_->tick();
  carry_out();
}

std::uint64_t Coordinator::next_due_ns() const {
  if (superseded_) return kNever;
  if (listening()) return std::min(open_ns_, beat_ns_);
  std::uint64_t due = std::min(beat_ns_, registry_->next_due_ns());
  for (const auto& [name, node] : nodes_) {
    if (node.state == NodeEntry::State::kUp)
      due = std::min(due, node.heard_ns + options_.times.node_timeout_ms * kMs + 1);
  }
  return due;
}

}  // namespace epd::membership
