#include "membership/agent.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::membership {
namespace {

constexpr std::uint64_t kMs = 1'000'000;

Spanning without_keys() {
  return {1, kFirstSpanningIndex, [] { return EpochKey{}; }};
}

// The group that an engine's message is about; 0: none.
std::uint64_t group_of(const Event& event) {
  const auto id = [](const auto& e) -> std::uint64_t {
    if constexpr (requires { e.message.group_id; }) return e.message.group_id;
    return 0;
  };
  return std::visit(id, event);
}

std::string seconds(std::uint64_t ns) {
  return std::to_string(ns / 1'000'000'000) + "." + std::to_string(ns / 100'000'000 % 10) + " s";
}

// Says who keeps the name of an ended group in use.
std::string still_here(const Group& group) {
  std::string who;
  for (const auto& [rank, member] : group.members) {
    if (member.gone()) continue;
    who += (who.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (session " +
           std::to_string(member.session.number) + ", pid " + std::to_string(member.pid) + ")";
  }
  return "group \"" + group.name + "\" has ended on this node, and is still in use by " +
         (who.empty() ? "its engines" : who) + "; allowed: to join when it is left";
}

}  // namespace

Agent::Agent(const Clock& clock, Options options)
    : clock_(clock),
      options_(std::move(options)),
      heard_ns_(clock.now_ns()),
      ended_(clock, options_.limits, without_keys()) {
  NodeUp here = options_.node;
  here.node = kLocalNode;
  ended_.handle(here);
}

bool Agent::cut_off() const {
  return silent_ns() > options_.times.node_timeout_ms * kMs;
}

Actions Agent::take_actions() {
  return std::exchange(actions_, {});
}

std::vector<ToCoordinator> Agent::take_messages() {
  return std::exchange(messages_, {});
}

void Agent::send(decltype(ToCoordinator::body) body) {
  messages_.push_back({term_, std::move(body)});
}

// ---- from the node

void Agent::handle(Event event) {
  if (std::holds_alternative<JoinRequest>(event) || std::holds_alternative<LeaveRequest>(event)) {
    request(event);
    return;
  }
  keep(event);
  if (is_answered_here(event)) {
    ended_.handle(event);
  } else {
    near_.said(event, clock_.now_ns());
    say(event);
  }
  take_from_ended();  // after the event, which may have made requests possible
}

Status Agent::evict(const EvictRank& event) {
  const std::string what =
      "rank " + std::to_string(event.rank) + " of group " + std::to_string(event.group_id);
  const auto ended = ended_.groups().find(event.group_id);
  if (ended != ended_.groups().end() && ended->second.lives(event.rank)) {
    ended_.handle(event);
    take_from_ended();
    return {};
  }
  const auto found = near_.all().find(event.group_id);
  if (found == near_.all().end()) return not_found(what + " is not on " + here());
  const NearGroup& group = found->second;
  const auto member = group.members.find(event.rank);
  if (member == group.members.end()) {
    const FarEngine* far = group.far_engine_of(event.rank);
    if (far == nullptr) return not_found(what + " is lost, or has never come");
    return {StatusCode::kUnsupported,
            what + " is on node " + far->node + "; allowed on " + here() + ": its own ranks"};
  }
  if (member->second.gone()) return not_found(what + " has left");
  if (state_ != State::kAttached || cut_off())
    return {StatusCode::kAborted, here() + " has no coordinator, which decides about " + what};
  forget_evictions();
  const RequestId join = member->second.join_id();
  std::erase_if(evictions_, [&join](const Eviction& kept) { return kept.join == join; });
  evictions_.push_back({event, join});
  say(event);
  return {};
}

// Whether the evicted member is still here. A rank that has come back is another member, with another join.
bool Agent::stands(const Eviction& eviction) const {
  const auto group = near_.all().find(eviction.event.group_id);
  if (group == near_.all().end()) return false;
  const auto member = group->second.members.find(eviction.event.rank);
  return member != group->second.members.end() && !member->second.gone() &&
         member->second.session.number == eviction.join.session.number &&
         member->second.join_request == eviction.join.number;
}

void Agent::forget_evictions() {
  std::erase_if(evictions_, [this](const Eviction& eviction) { return !stands(eviction); });
}

// The next coordinator would be told these joins, and does not know of the evictions.
void Agent::refuse_evicted_joins() {
  for (const auto& [event, join] : evictions_) {
    const std::string text = "rank " + std::to_string(event.rank) + " " + event.how;
    if (requests_.erase(join)) actions_.emplace_back(ReplyRefused{join, Status(StatusCode::kAborted, text)});
  }
}

// An earlier coordinator may not have decided about them.
void Agent::say_evictions() {
  forget_evictions();
  for (const Eviction& eviction : evictions_) say(eviction.event);
}

// Keeps what each new coordinator must be told. Also tells the registry of ended groups.
void Agent::keep(const Event& event) {
  const bool of_all = std::holds_alternative<EngineUp>(event) || std::holds_alternative<EngineDown>(event) ||
                      std::holds_alternative<SessionClosed>(event);
  if (const auto* up = std::get_if<EngineUp>(&event)) {
    engines_[up->engine.device] = up->address;
    known_from_[up->engine.device] = told_ + 1;
  } else if (const auto* down = std::get_if<EngineDown>(&event)) {
    engines_.erase(down->engine.device);
  } else if (const auto* closed = std::get_if<SessionClosed>(&event)) {
    requests_.erase_session(closed->session);
    generations_.erase(closed->session.number);
  } else if (const auto* drains = std::get_if<NodeDrains>(&event)) {
    drains_ = true;
    drain_status_ = drains->status;
    refuse_overdue();
  }
  if (of_all) ended_.handle(event);
}

bool Agent::is_answered_here(const Event& event) const {
  return ended_.groups().contains(group_of(event));
}

// Whether the leave names a membership that ended here without the coordinator.
bool Agent::names_ended(const LeaveRequest& leave) const {
  for (const auto& [id, group] : ended_.groups()) {
    for (const auto& [rank, member] : group.members) {
      if (member.session == leave.id.session && member.member == leave.member) return true;
    }
  }
  return false;
}

void Agent::request(const Event& event) {
  if (const auto* leave = std::get_if<LeaveRequest>(&event)) {
    if (names_ended(*leave)) {
      ended_.handle(event);
      take_from_ended();
      return;
    }
    requests_.add(leave->id, event, kNever);
  } else {
    JoinRequest join = std::get<JoinRequest>(event);
    if (join.join.timeout_ms == 0) join.join.timeout_ms = options_.limits.join_timeout_ms;
    const std::uint64_t due_ns = clock_.now_ns() + join.join.timeout_ms * kMs;
    requests_.add(join.id, join, due_ns);
  }
  say_requests();
}

void Agent::say(const Event& event) {
  if (state_ == State::kApart) return;
  ++told_;
  Told told{event};
  if (auto* join = std::get_if<JoinRequest>(&told.event)) {
    const auto last = generations_.find(join->id.session.number);
    if (last != generations_.end()) join->last_generation = last->second;
  }
  send(std::move(told));
}

// ---- the attachment

void Agent::channel_began() {
  attach();
}

// Begins a new attachment. Earlier messages are given up; later ones build on Attach.
void Agent::attach() {
  messages_.clear();
  refuse_evicted_joins();
  release_unstarted();
  Attach message;
  message.attempt = ++attempt_;
  message.boot = options_.node.boot;
  message.number = number_;
  message.drains = drains_;
  message.devices = options_.node.devices;
  for (const auto& [device, address] : engines_) {
    message.engines.push_back({device, address});
    known_from_[device] = 0;
  }
  message.groups = near_.steady();
  state_ = State::kAttaching;
  told_ = 0;
  requests_.unsay_all();
  send(std::move(message));
  beat_ns_ = clock_.now_ns() + options_.times.heartbeat_ms * kMs;
}

// Releases the memory of ranks that no engine here knows. Their joins will be said again.
void Agent::release_unstarted() {
  for (const ReleaseMemory& action : near_.take_unannounced()) actions_.emplace_back(action);
}

void Agent::handle(const ToAgent& message) {
  if (message.term < term_) {
    send(Superseded{});
    return;
  }
  const auto* welcome = std::get_if<Welcome>(&message.body);
  const bool beat = std::holds_alternative<CoordinatorHeartbeat>(message.body);
  if (state_ == State::kApart) {
    if (welcome == nullptr) attach();
    return;
  }
  if (welcome != nullptr && (state_ != State::kAttaching || welcome->attempt != attempt_)) return;
  // This is the first message of a new coordinator.
  if (welcome == nullptr && state_ == State::kAttached && message.term > term_) {
    attach();
    return;
  }
  const bool for_this =
      message.number == number_ || (message.number == 0 && std::holds_alternative<PutOut>(message.body));
  if (welcome == nullptr && !beat && (state_ != State::kAttached || !for_this)) return;
  heard_ns_ = clock_.now_ns();
  if (welcome != nullptr) {
    const bool kept = number_ == message.number;
    number_ = message.number;
    term_ = message.term;
    if (kept)
      end_all_but(welcome->groups, Whose::kOther, "the coordinator was restarted without its group");
    else
      end_all_but(welcome->groups, Whose::kOwn,
                  here() + " was put out of the cluster" + (put_out_.empty() ? "" : ": " + put_out_));
    put_out_.clear();
  }
  std::visit([this](const auto& of) { obey(of); }, message.body);
}

void Agent::obey(const PutOut& message) {
  put_out_ = message.text;
  attach();
}

void Agent::obey(const Welcome&) {
  state_ = State::kAttached;
  say_evictions();
  say_requests();
}

// An engine that still knows an ended group can't be told of the next one of the same name.
const Group* Agent::waits_for(const Event& request) const {
  const auto* join = std::get_if<JoinRequest>(&request);
  if (join == nullptr) return nullptr;
  for (const auto& [id, group] : ended_.groups()) {
    if (group.uid == join->uid && group.name == join->join.group && abi::degrades(group.shape.policy))
      return &group;
  }
  return nullptr;
}

void Agent::say_requests() {
  refuse_overdue();
  if (state_ != State::kAttached) return;
  while (!requests_.to_say().empty()) {
    const RequestId id = *requests_.to_say().begin();
    const Requests::Request& request = *requests_.find(id);
    if (const Group* ended = waits_for(request.event); ended != nullptr) {
      requests_.hold(id, ended->id);
      continue;
    }
    Event event = request.event;
    if (auto* join = std::get_if<JoinRequest>(&event))
      join->join.timeout_ms =
          static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (request.due_ns - clock_.now_ns()) / kMs));
    requests_.mark_said(id);
    say(event);
  }
}

// Whether the order is for an engine that has started since, or is down.
bool Agent::is_late(const Order& order) const {
  const auto late = [&](const auto& action) {
    using T = std::decay_t<decltype(action)>;
    constexpr bool kForMemory = std::is_same_v<T, AcquireMemory> || std::is_same_v<T, ReleaseMemory> ||
                                std::is_same_v<T, MarkLost> || std::is_same_v<T, CloseStreams>;
    if constexpr (requires { action.engine; } && !kForMemory) {
      const std::uint32_t device = action.engine.device;
      return !engines_.contains(device) || known_from_.at(device) > order.heard;
    } else {
      return false;
    }
  };
  return std::visit(late, order.action);
}

void Agent::obey(const Order& order) {
  if (!is_late(order)) carry_out(order.action);
}

// A closed session's members are gone by then, so nothing is kept of it.
void Agent::note_number(std::uint64_t group_id, const MemberDescription& member) {
  const auto group = near_.all().find(group_id);
  if (group == near_.all().end()) return;
  const auto here = group->second.members.find(member.rank);
  if (here == group->second.members.end() || here->second.gone()) return;
  std::uint32_t& last = generations_[member.session.number];
  last = std::max(last, member_generation(member.member));
}

void Agent::carry_out(Action action) {
  const JoinRequest* join = nullptr;
  const auto note = [&](const auto& a) {
    if constexpr (requires { a.request; }) {
      RequestId id = a.request;
      id.session.node = kLocalNode;
      if (const Requests::Request* found = requests_.find(id); found != nullptr)
        join = std::get_if<JoinRequest>(&found->event);
    }
  };
  std::visit(note, action);
  near_.decided(action, join, clock_.now_ns());
  if (const auto* start = std::get_if<StartGroup>(&action)) {
    for (const MemberDescription& member : start->group.members) note_number(start->group.label.id, member);
  } else if (const auto* newcomer = std::get_if<SendMember>(&action)) {
    note_number(newcomer->group_id, newcomer->member);
  }
  // Each request has one answer.
  const auto answer = [this](const auto& a) {
    using T = std::decay_t<decltype(a)>;
    if constexpr (std::is_same_v<T, ReplyJoined> || std::is_same_v<T, ReplyLeft> ||
                  std::is_same_v<T, ReplyRefused>) {
      RequestId id = a.request;
      id.session.node = kLocalNode;
      return requests_.erase(id);
    } else {
      return true;
    }
  };
  if (std::visit(answer, action)) actions_.push_back(std::move(action));
}

// ---- without the coordinator

// Returns the first such rank. Which of the others are lost is not known here.
std::optional<std::uint32_t> Agent::lost_of(const NearGroup& group, Whose whose) {
  if (whose == Whose::kOther) {
    for (const RankDescription& rank : group.ranks) {
      if (rank.active_since != 0 && !group.members.contains(rank.rank)) return rank.rank;
    }
  }
  return group.members.empty() ? std::nullopt : std::optional(group.members.begin()->first);
}

void Agent::end_all_but(const std::vector<std::uint64_t>& stay, Whose whose, const std::string& why) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, group] : near_.all()) {
    if (std::find(stay.begin(), stay.end(), id) == stay.end()) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) {
    BreakReason reason{StatusCode::kRankLost, -1, why};
    if (const auto rank = lost_of(near_.all().at(id), whose)) {
      reason.failed_rank = static_cast<std::int32_t>(*rank);
      reason.text = "rank " + std::to_string(*rank) + " was lost: " + why;
    }
    end(id, reason);
  }
}

void Agent::end(std::uint64_t group_id, const BreakReason& reason) {
  std::vector<Event> evictions;
  for (const Eviction& eviction : evictions_) {
    if (eviction.event.group_id == group_id && stands(eviction)) evictions.emplace_back(eviction.event);
  }
  NearGroup group = near_.take(group_id);
  const BreakReason why = group.failed ? group.reason : reason;
  ended_.adopt_to_end(std::move(group).to_end(), why);
  for (const Event& eviction : evictions) ended_.handle(eviction);
  // Leaves that the coordinator has not answered are answered here.
  for (const RequestId& id : std::set<RequestId>(requests_.leaves())) {
    const Event leave = requests_.find(id)->event;
    if (!names_ended(std::get<LeaveRequest>(leave))) continue;
    requests_.erase(id);
    ended_.handle(leave);
  }
  take_from_ended();
}

void Agent::take_from_ended() {
  for (Action& action : ended_.take_actions()) actions_.push_back(std::move(action));
  for (const std::uint64_t group_id : requests_.holders()) {
    if (!ended_.groups().contains(group_id)) requests_.release(group_id);
  }
  say_requests();
}

// The coordinator does not know these joins, so the agent refuses them.
void Agent::refuse_overdue() {
  for (const RequestId& id : requests_.unsaid_joins(drains_ ? kNever : clock_.now_ns())) {
    const Group* const ended = waits_for(requests_.find(id)->event);
    const Status late(StatusCode::kDeadlineExceeded,
                      ended != nullptr ? still_here(*ended)
                                       : here() + " has had no coordinator for " + seconds(silent_ns()));
    requests_.erase(id);
    actions_.emplace_back(ReplyRefused{id, drains_ ? drain_status_ : late});
  }
}

// Whether the group needs no decision. A group whose engines can't reach each other has to break, even before
// an operation misses its deadline.
bool Agent::runs_on(const NearGroup& group) const {
  const std::uint64_t lasts_ns = 2 * options_.times.node_timeout_ms * kMs;
  return group.is_steady() && !(group.pair_lost_ns && clock_.now_ns() < *group.pair_lost_ns + lasts_ns);
}

bool Agent::needs_decision() const {
  return std::any_of(near_.all().begin(), near_.all().end(),
                     [this](const auto& entry) { return entry.second.started && !runs_on(entry.second); }) ||
         !requests_.leaves().empty() || requests_.due_ns() <= clock_.now_ns();
}

bool Agent::has_leave_of(const NearGroup& group) const {
  return std::any_of(requests_.leaves().begin(), requests_.leaves().end(), [&](const RequestId& id) {
    return group.has_member(id.session.number, std::get<LeaveRequest>(requests_.find(id)->event).member);
  });
}

// Refuses leaves that name no membership here.
void Agent::refuse_leaves() {
  for (const RequestId& id : std::set<RequestId>(requests_.leaves())) {
    const std::uint32_t member = std::get<LeaveRequest>(requests_.find(id)->event).member;
    const std::string text = "member " + std::to_string(member) + " is not a membership of session " +
                             to_string(id.session) + "; allowed: the number that Joined gave";
    requests_.erase(id);
    actions_.emplace_back(ReplyRefused{id, not_found(text)});
  }
}

// Ends groups that need a decision, or that a rank here asks to leave: the ranks here leave by that. Others
// continue.
void Agent::give_up() {
  state_ = State::kApart;
  messages_.clear();
  requests_.unsay_all();
  release_unstarted();
  std::vector<std::uint64_t> stay;
  for (const auto& [id, group] : near_.all()) {
    if (runs_on(group) && !has_leave_of(group)) stay.push_back(id);
  }
  end_all_but(stay, Whose::kOwn, here() + " has had no coordinator for " + seconds(silent_ns()));
  refuse_leaves();
}

void Agent::tick() {
  ended_.tick();
  take_from_ended();
  const std::uint64_t now = clock_.now_ns();
  if (silent_ns() >= options_.times.orphan_ms * kMs && needs_decision()) give_up();
  refuse_overdue();
  if (state_ == State::kApart || beat_ns_ > now) return;
  beat_ns_ = now + options_.times.heartbeat_ms * kMs;
  send(AgentHeartbeat{!cut_off()});
}

std::uint64_t Agent::next_due_ns() const {
  std::uint64_t due = ended_.next_due_ns();
  if (state_ != State::kApart) due = std::min(due, beat_ns_);
  if (needs_decision())
    due = std::min(due, std::max(clock_.now_ns(), heard_ns_ + options_.times.orphan_ms * kMs));
  return std::min(due, requests_.unsaid_due_ns());
}

}  // namespace epd::membership
