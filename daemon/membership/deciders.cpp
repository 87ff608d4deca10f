#include "membership/deciders.h"

#include "base/event.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace epd::membership {
namespace {

enum class Concern { kLocal, kSpanning, kBoth };

Concern of_group(std::uint64_t group_id) {
  return is_spanning(group_id) ? Concern::kSpanning : Concern::kLocal;
}

// Which decider an event concerns.
Concern concern_of(const Event& event) {
  const auto judge = [](const auto& e) {
    using T = std::decay_t<decltype(e)>;
    if constexpr (std::is_same_v<T, JoinRequest>) {
      return e.join.shape.span == abi::Span::kCluster ? Concern::kSpanning : Concern::kLocal;
    } else if constexpr (std::is_same_v<T, LeaveRequest>) {
      return member_index(e.member) >= kFirstSpanningIndex ? Concern::kSpanning : Concern::kLocal;
    } else if constexpr (std::is_same_v<T, PeerLost>) {
      return Concern::kSpanning;
    } else if constexpr (requires { e.group_id; }) {
      return of_group(e.group_id);
    } else if constexpr (requires { e.message.group_id; }) {
      return of_group(e.message.group_id);
    } else {
      return Concern::kBoth;
    }
  };
  return std::visit(judge, event);
}

// The coordinator names sessions with this node's number. Here they have none.
void name_own_request(Action& action) {
  const auto name = [](auto& a) {
    if constexpr (requires { a.request.session; }) a.request.session.node = kLocalNode;
  };
  std::visit(name, action);
}

bool names_no_device(const Action& action, std::uint32_t num_devices) {
  const auto judge = [num_devices](const auto& a) {
    if constexpr (requires { a.engine.device; }) return a.engine.device >= num_devices;
    return false;
  };
  return std::visit(judge, action);
}

}  // namespace

Deciders::Deciders(const Clock& deadlines, const MembershipLimits& limits, const NodeUp& node)
    : deadlines_(deadlines),
      num_devices_(static_cast<std::uint32_t>(node.devices.size())),
      local_(deadlines, limits) {
  local_.handle(node);
}

Agent& Deciders::make_agent(const ClusterTimes& times, const MembershipLimits& limits, const NodeUp& node) {
  agent_ = std::make_unique<Agent>(deadlines_, Agent::Options{times, limits, node});
  return *agent_;
}

// Without a cluster the registry itself says that no group spans nodes.
void Deciders::handle(const Event& event) {
  const Concern concern = agent_ == nullptr ? Concern::kLocal : concern_of(event);
  if (concern != Concern::kSpanning) local_.handle(event);
  if (concern != Concern::kLocal) agent_->handle(event);
}

Status Deciders::evict(const EvictRank& event) {
  if (agent_ != nullptr && is_spanning(event.group_id)) return agent_->evict(event);
  local_.handle(event);
  return {};
}

void Deciders::tick() {
  local_.tick();
  if (agent_ != nullptr) agent_->tick();
}

std::uint64_t Deciders::next_due_ns() const {
  const std::uint64_t due = local_.next_due_ns();
  return agent_ == nullptr ? due : std::min(due, agent_->next_due_ns());
}

Actions Deciders::take_actions() {
  Actions actions = local_.take_actions();
  if (agent_ == nullptr) return actions;
  for (Action& action : agent_->take_actions()) {
    if (names_no_device(action, num_devices_)) {
      static LogLimiter limiter;
      limiter.log(LogLevel::kError, "order of the coordinator dropped: there is no such device",
                  {{"order", to_string(action)}, {"devices", num_devices_}});
      continue;
    }
    name_own_request(action);
    actions.push_back(std::move(action));
  }
  return actions;
}

void Deciders::each(const std::function<void(const Group&)>& look) const {
  for (const auto& [id, group] : local_.groups()) look(group);
  if (agent_ == nullptr) return;
  for (const auto& [id, near] : agent_->groups()) look(near);
  for (const auto& [id, group] : agent_->ended()) look(group);
}

const Group* Deciders::find(std::uint64_t group_id) const {
  const auto in = [group_id](const auto& groups) -> const Group* {
    const auto found = groups.find(group_id);
    return found == groups.end() ? nullptr : &found->second;
  };
  const Group* found = in(local_.groups());
  if (found == nullptr && agent_ != nullptr) found = in(agent_->groups());
  if (found == nullptr && agent_ != nullptr) found = in(agent_->ended());
  return found;
}

const NearGroup* Deciders::near_group(std::uint64_t group_id) const {
  if (agent_ == nullptr) return nullptr;
  const auto found = agent_->groups().find(group_id);
  return found == agent_->groups().end() ? nullptr : &found->second;
}

std::vector<Deciders::FarRank> Deciders::far_ranks(std::uint64_t group_id) const {
  const NearGroup* near = near_group(group_id);
  if (near == nullptr) return {};
  std::vector<FarRank> ranks;
  for (const RankDescription& rank : near->ranks) {
    const FarEngine* engine = near->far_engine_of(rank.rank);
    if (engine != nullptr) ranks.push_back({rank.rank, rank.engine.device, engine->node});
  }
  return ranks;
}

std::vector<std::uint32_t> Deciders::missing_ranks(const Group& group) const {
  std::vector<std::uint32_t> missing;
  const NearGroup* near = near_group(group.id);
  const bool runs = group.is(GroupPhase::kActive) || group.is(GroupPhase::kBreaking);
  if (!runs && (near != nullptr || !group.is(GroupPhase::kForming))) return missing;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const bool far = near != nullptr && rank < near->ranks.size() && near->ranks[rank].active_since != 0;
    if (!far && !group.members.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

std::uint64_t Deciders::coordinator_away_ms(std::uint64_t group_id) const {
  if (near_group(group_id) == nullptr || !agent_->cut_off()) return 0;
  return std::max<std::uint64_t>(1, agent_->silent_ns() / 1'000'000);
}

std::size_t Deciders::num_groups() const {
  const std::size_t spanning = agent_ == nullptr ? 0 : agent_->groups().size() + agent_->ended().size();
  return local_.groups().size() + spanning;
}

std::uint32_t Deciders::memberships(std::uint64_t session_id) const {
  std::uint32_t count = local_.memberships({kLocalNode, session_id});
  if (agent_ == nullptr) return count;
  for (const auto& [id, group] : agent_->groups()) {
    count += static_cast<std::uint32_t>(
        std::count_if(group.members.begin(), group.members.end(), [session_id](const auto& entry) {
          return entry.second.session.number == session_id && !entry.second.gone();
        }));
  }
  return count;
}

}  // namespace epd::membership
