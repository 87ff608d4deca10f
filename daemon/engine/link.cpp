// Engine: the supervisor's messages.

#include "base/log.h"
#include "commands.h"
#include "engine.h"

namespace epd {

using abi::LinkType;

void Engine::listen() {
  link_.on(LinkType::kAddSession, *this, &Engine::add_session);
  link_.on(LinkType::kRemoveSession, *this, &Engine::remove_session);
  link_.on(LinkType::kAllTold, *this, &Engine::note_all_told);
  link_.on(LinkType::kGroupBegin, *this, &Engine::begin_group);
  link_.on(LinkType::kGroupRank, *this, &Engine::add_rank);
  link_.on(LinkType::kGroupMember, *this, &Engine::add_member);
  link_.on(LinkType::kGroupCommit, *this, &Engine::commit_group);
  link_.on(LinkType::kCloseStreams, *this, &Engine::close_streams);
  link_.on(LinkType::kStopMember, *this, &Engine::stop_member);
  link_.on(LinkType::kBreak, *this, &Engine::break_group);
  link_.on(LinkType::kResume, *this, &Engine::resume_group);
  link_.on(LinkType::kRelease, *this, &Engine::release_group);
  link_.on(LinkType::kRemoveGroup, *this, &Engine::remove_group);
  link_.on(LinkType::kSettings, *this, &Engine::apply_settings);
  link_.on(LinkType::kGroupSettings, *this, &Engine::apply_group_settings);
}

// Of one that is being removed the supervisor speaks no more.
Group* Engine::find_group(std::uint64_t id) {
  const auto found = groups_.find(id);
  const bool known = found != groups_.end() && !found->second->life.is(GroupPhase::kRemoving);
  return known ? found->second.get() : nullptr;
}

Member* Engine::find_member(Group& group, std::uint32_t rank) {
  for (const auto& member : group.members) {
    if (member->rank == rank) return member.get();
  }
  return nullptr;
}

Status Engine::add_session(Packet& packet) {
  const Result<abi::AddSession> body = packet.read<abi::AddSession>();
  if (!body.ok()) return body.status();
  if (packet.fds.size() != 3)
    return invalid_argument("kAddSession with " + std::to_string(packet.fds.size()) + " fds");
  const std::uint64_t id = body.value().session_id;
  auto port =
      SessionPort::open(id, {std::move(packet.fds[0]), std::move(packet.fds[1]), std::move(packet.fds[2])});
  if (!port.ok()) {
    abi::SessionFailed failed{id, port.status().code(), {}};
    abi::set_text(failed.text, port.status().message().data(), port.status().message().size());
    link_.send(LinkType::kSessionFailed, failed);
    return {};
  }
  (*port)->statistics = Statistics::of_session(page_, id);
  if (all_told_) (*port)->set_all_told();
  sessions_[id] = std::move(port).value();
  return {};
}

Status Engine::remove_session(const abi::SessionRef& message) {
  watch_.note_client_gone(clock_.round_ns());
  const auto found = sessions_.find(message.session_id);
  if (found == sessions_.end()) {
    link_.send(LinkType::kSessionRemoved, message);  // never got this far, or failed to open
  } else {
    found->second->removing = true;
  }
  return {};
}

// Whatever former engines left behind for another group than those told by now, nobody waits for any more.
Status Engine::note_all_told(const abi::AllTold& /*message*/) {
  all_told_ = true;
  for (const auto& [id, session] : sessions_) session->set_all_told();
  return {};
}

Status Engine::begin_group(const abi::GroupBegin& message) {
  if (groups_.contains(message.group_id))
    return invalid_argument("group " + std::to_string(message.group_id) + " twice");
  groups_[message.group_id] = std::make_unique<Group>(message);
  return {};
}

Status Engine::commit_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr || !group->life.is_forming())
    return invalid_argument("kGroupCommit for group " + std::to_string(message.group_id));
  for (const auto& member : group->members) member->session->members[member->number] = member.get();
  abi::GroupReady ready{message.group_id, StatusCode::kOk, {}};
  if (!group->unusable.ok()) {
    ready.status = group->unusable.code();
    abi::set_text(ready.text, group->unusable.message().data(), group->unusable.message().size());
  } else if (const std::string missing = group->check_complete(); !missing.empty()) {
    ready.status = StatusCode::kInternal;
    abi::set_text(ready.text, missing.data(), missing.size());
  } else if (group->life.is(GroupPhase::kRestoring)) {
    // kGroupReady is the acknowledgement, and boards say how far ranks have come.
    group->life.enter(GroupPhase::kBroken);
    for (const auto& member : group->members) catch_up(*member);
    group->cause.cause = StatusCode::kEngineRestarted;
    group->cause.culprit_rank =
        group->members.empty() ? -1 : static_cast<std::int32_t>(group->members.front()->rank);
    const std::string text = "the engine of " + device_->name() + " was restarted";
    abi::set_text(group->cause.text, text.data(), text.size());
  } else {
    for (const auto& member : group->members) {
      if (member->commands != nullptr) start_commands(*member, true);
    }
    group->life.enter(GroupPhase::kStarting);
    owe_start(*group);
    return {};
  }
  link_.send(LinkType::kGroupReady, ready);
  return {};
}

Status Engine::apply_settings(const abi::Settings& message) {
  settings_ = message;
  device_->set_num_sms(message.sms);
  log_set_level(static_cast<LogLevel>(message.log_level));
  for (const auto& [id, group] : groups_) tell_limits(*group);
  return {};
}

Status Engine::apply_group_settings(const abi::GroupSettings& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr)
    return invalid_argument("kGroupSettings for group " + std::to_string(message.group_id));
  group->sms = message.sms;
  group->priority = message.priority;
  for (const auto& member : group->members) {
    if (member->lane != nullptr) member->lane->set_priority(message.priority);
  }
  tell_limits(*group);
  return {};
}

}  // namespace epd
