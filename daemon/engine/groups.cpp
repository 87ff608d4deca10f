// Groups, first part: how they form, and what each round does for them. group_breaks.cpp has the breaks.
#include "groups.h"

#include "base/log.h"
#include "calls.h"

#include <algorithm>

namespace epd::engine {

using abi::LinkType;

Groups::Groups(device::Device& device, Page& page, SupervisorLink& link, Sessions& sessions,
               FarEngines& far_engines, const RoundClock& clock)
    : device_(device),
      link_(link),
      sessions_(sessions),
      far_engines_(far_engines),
      clock_(clock),
      reclaimer_(clock),
      ranks_(device, page, reclaimer_),
      journals_(page, link, sessions, clock),
      starts_(device.name(), link, journals_, far_engines, clock) {}

// The supervisor no longer names a group that is being removed.
Group* Groups::find(std::uint64_t id) const {
  const auto found = groups_.find(id);
  const bool known = found != groups_.end() && !found->second->life.is(GroupPhase::kRemoving);
  return known ? found->second.get() : nullptr;
}

Status Groups::begin_group(const abi::GroupBegin& message) {
  if (groups_.contains(message.group_id))
    return invalid_argument("group " + std::to_string(message.group_id) + " twice");
  std::unique_ptr<FarSide> far = message.node == 0 ? nullptr : far_engines_.make_side(message);
  auto& group = groups_[message.group_id] = std::make_unique<Group>(message, std::move(far));
  if (group->far == nullptr) return {};
  group->unusable = far_engines_.usable();
  if (group->unusable.ok()) group->unusable = far_engines_.check_sizes(*group->far);
  return {};
}

Status Groups::add_rank(Packet& packet) {
  const Result<abi::GroupRank> body = packet.read<abi::GroupRank>();
  if (!body.ok()) return body.status();
  const abi::GroupRank& message = body.value();
  Group* group = find(message.group_id);
  const bool changeable = group != nullptr && group->life.takes_ranks();
  const bool is_far = changeable && group->far != nullptr && message.node != group->far->node();
  const bool mapped = message.active_since != 0 && !is_far;
  const bool fits = mapped ? packet.fds.size() == abi::kRankFds : packet.fds.empty();
  if (!changeable || message.rank >= group->shape.num_ranks || !fits) {
    return invalid_argument("kGroupRank for group " + std::to_string(message.group_id) + " rank " +
                            std::to_string(message.rank) + " with " + std::to_string(packet.fds.size()) +
                            " descriptors");
  }
  // A rank that joined while this engine was being told of the group is told twice. Its memory is the same,
  // and a kernel may be reading it.
  if (message.active_since != 0 && group->active_since[message.rank] == message.active_since) return {};
  group->refused.erase(message.rank);
  drop_member(*group, message.rank);
  if (group->far != nullptr) group->far->place(message);
  if (message.active_since == 0) ranks_.mask(*group, message.rank);
  if (is_far && message.active_since != 0) ranks_.place_far(*group, message.rank, message.active_since);
  if (!mapped) return {};
  const Status status = ranks_.map(*group, message, packet);
  if (!status.ok()) refuse_rank(*group, message.rank, status);
  return {};
}

// This engine masks the rank. It can't complete operations in which others expect the rank, so the supervisor
// refuses the group or breaks it.
void Groups::refuse_rank(Group& group, std::uint32_t rank, const Status& status) {
  log_event(LogLevel::kWarning, "rank refused",
            {{"group", group.id}, {"name", group.name}, {"rank", rank}, {"reason", status.message()}});
  ranks_.mask(group, rank);
  group.refused.insert(rank);
  abi::RankRefused message{group.id, rank, status.code(), {}};
  abi::set_text(message.text, status.message().data(), status.message().size());
  link_.send(LinkType::kRankRefused, message);
}

Status Groups::add_member(Packet& packet) {
  const Result<abi::GroupMember> body = packet.read<abi::GroupMember>();
  if (!body.ok()) return body.status();
  const abi::GroupMember& message = body.value();
  Group* group = find(message.group_id);
  if (group != nullptr && group->refused.count(message.rank) == 1) return {};
  SessionPort* const session = sessions_.find(message.session_id);
  if (group == nullptr || session == nullptr || packet.fds.size() != 2 ||
      message.rank >= group->shape.num_ranks || !group->active(message.rank)) {
    return invalid_argument("kGroupMember for group " + std::to_string(message.group_id) + " session " +
                            std::to_string(message.session_id));
  }
  // A member that joined while this engine was being told of the group is told twice.
  if (Member* known = group->member(message.rank); known != nullptr) {
    known->first_index = message.first_index;
    return {};
  }
  Result<std::unique_ptr<Member>> made = ranks_.serve(*group, message, *session, packet);
  if (!made.ok()) {
    refuse_rank(*group, message.rank, made.status());
    return {};
  }
  std::unique_ptr<Member> member = std::move(made).value();
  if (member->calls != nullptr) journals_.add(*member);
  // While a group forms, its members wait for kGroupCommit, which may come in another round.
  if (!group->life.is_forming()) session->members.push_back(member.get());
  group->members.push_back(std::move(member));
  return {};
}

// Opening takes up to some milliseconds. Calls do not wait for the loop meanwhile. A rank may have gone.
Status Groups::map_memory(Packet& packet) {
  const Result<abi::GroupMemory> body = packet.read<abi::GroupMemory>();
  if (!body.ok()) return body.status();
  const abi::GroupMemory& message = body.value();
  if (const std::string wrong = abi::check_memory_range(message.range, packet.fds.size()); !wrong.empty())
    return internal_error(wrong);
  Group* group = find(message.group_id);
  const bool there = group != nullptr && message.rank < group->ranks.size() && group->active(message.rank);
  const Status status = there ? ranks_.map_memory(*group, message, packet)
                              : Status(StatusCode::kAborted, "the rank has left its group");
  abi::MemoryMapped answer{message.group_id,         message.rank,  message.range.number,
                           message.range.generation, status.code(), {}};
  abi::set_text(answer.text, status.message().data(), status.message().size());
  link_.send(LinkType::kMemoryMapped, answer);
  return {};
}

// For a rank that has been lost. Its calls have been halted.
void Groups::drop_member(Group& group, std::uint32_t rank) {
  Member* member = group.member(rank);
  if (member == nullptr) return;
  end_member(*member);
  std::erase_if(group.members, [member](const auto& entry) { return entry.get() == member; });
}

// Must be called before the member is destroyed.
void Groups::end_member(Member& member) {
  if (member.session != nullptr) std::erase(member.session->members, &member);
  journals_.remove(member);
  reclaimer_.take(member);
}

Status Groups::commit_group(const abi::GroupRef& message) {
  Group* group = find(message.group_id);
  if (group == nullptr || !group->life.is_forming())
    return invalid_argument("kGroupCommit for group " + std::to_string(message.group_id));
  for (const auto& member : group->members) member->session->members.push_back(member.get());
  abi::GroupReady ready{message.group_id, StatusCode::kOk, {}};
  Status usable = group->unusable;
  if (const std::string missing = group->check_complete(); usable.ok() && !missing.empty())
    usable = Status(StatusCode::kInternal, missing);
  if (!usable.ok()) {
    ready.status = usable.code();
    abi::set_text(ready.text, usable.message().data(), usable.message().size());
    // Its end, or that of its ranks here, comes as to any engine that has broken.
    if (group->life.is(GroupPhase::kRestoring)) break_restored(*group);
  } else if (group->life.is(GroupPhase::kRestoring)) {
    for (const auto& member : group->members) {
      if (member->calls != nullptr) member->calls->catch_up();
      member->publish_next_index();
    }
    break_restored(*group);
  } else if (const Status far = begin_far(*group); !far.ok()) {
    end_far(*group);
    ready.status = far.code();
    abi::set_text(ready.text, far.message().data(), far.message().size());
  } else {
    group->life.enter(GroupPhase::kStarting);
    start_calls(*group, true);
    starts_.owe(*group);
    return {};
  }
  link_.send(LinkType::kGroupReady, ready);
  return {};
}

// kGroupReady also acknowledges the break. The former engine has left boards that say that the group is
// active. Before it is that again, calls of the old epoch are refused, and then clients ask the boards.
// kResume says why the group has broken.
void Groups::break_restored(Group& group) {
  group.life.enter(GroupPhase::kBroken);
  group.cause.cause = StatusCode::kEngineRestarted;
  group.cause.failed_rank = -1;
  const std::string text = "the engine of " + device_.name() + " was restarted";
  abi::set_text(group.cause.text, text.data(), text.size());
  for (const auto& member : group.members) member->publish_state(abi::GroupState::kBroken, group.cause);
}

// For a group whose ranks are on several nodes: connects its engines and sends greetings. An error concerns
// the memory that was promised.
Status Groups::begin_far(Group& group) {
  if (group.far == nullptr) return {};
  group.far->begin(group.epoch, group.in_tags(group.resume_index), group.masked, clock_.now_ns());
  return far_engines_.serve(*group.far);
}

void Groups::end_far(const Group& group) {
  if (group.far == nullptr) return;
  group.far->end();
  // Some messages of a former epoch are normal.
  if (const std::string drops = group.far->drops(); drops != "none")
    log_event(LogLevel::kInfo, "far messages dropped",
              {{"group", group.id}, {"name", group.name}, {"reasons", drops}});
  far_engines_.forget(*group.far);
}

void Groups::start_calls(const Group& group, bool fresh) {
  follow_settings(group);
  for (const auto& member : group.members) {
    if (member->calls != nullptr) member->calls->resume(fresh);
  }
}

void Groups::follow_settings(const Group& group) const {
  for (const auto& member : group.members) {
    if (member->calls != nullptr)
      member->calls->follow_settings(default_timeout_ms_, group.linger_us.value_or(default_linger_us_));
  }
}

void Groups::set_defaults(std::uint32_t timeout_ms, std::uint32_t linger_us) {
  default_timeout_ms_ = timeout_ms;
  default_linger_us_ = linger_us;
  for (const auto& [id, group] : groups_) follow_settings(*group);
}

Status Groups::apply_settings(const abi::GroupSettings& message) {
  Group* group = find(message.group_id);
  if (group == nullptr)
    return invalid_argument("kGroupSettings for group " + std::to_string(message.group_id));
  group->sms = message.sms;
  group->priority = message.priority;
  group->linger_us = message.own_linger != 0 ? std::optional(message.linger_us) : std::nullopt;
  for (const auto& member : group->members) {
    if (member->lane != nullptr) member->lane->set_priority(message.priority);
  }
  follow_settings(*group);
  return {};
}

bool Groups::read_journals() {
  const bool progress = journals_.read();
  journals_.halt_lost();
  return progress;
}

void Groups::advance() {
  answer_stops();
  starts_.finish();
  for (const auto& [id, group] : groups_) {
    give_up_memory(*group);
    acknowledge_break(*group);
  }
  finish_removals();
}

bool Groups::reclaim() {
  if (reclaimer_.empty()) return false;
  const std::uint64_t end = clock_.now_ns() + kShareNs;
  do {
    reclaimer_.step();
  } while (!reclaimer_.empty() && clock_.now_ns() < end);
  return true;
}

void Groups::halt() {
  for (const auto& [id, group] : groups_) {
    for (const auto& member : group->members) {
      if (member->calls != nullptr) member->calls->halt();
    }
  }
}

void Groups::clear() {
  for (const auto& [id, group] : groups_) {
    if (group->far != nullptr) far_engines_.forget(*group->far);
  }
  groups_.clear();
}

bool Groups::settled() const {
  return std::all_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return entry.second->settled(); });
}

}  // namespace epd::engine
