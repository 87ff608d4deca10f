// Carries out what the registry decides.
#include "base/event.h"
#include "node.h"

namespace epd {

// Nothing that is carried out may come back here: its actions would overtake those that still wait.
void Node::carry_out_actions() {
  EPD_CHECK(!std::exchange(carrying_out_, true));
  for (membership::Actions actions = registry_.take_actions(); !actions.empty();
       actions = registry_.take_actions()) {
    for (const membership::Action& action : actions) {
      if (log_enabled(LogLevel::kDebug))
        log_event(LogLevel::kDebug, "membership action", {{"action", to_string(action)}});
      std::visit([this](const auto& what) { carry_out(what); }, action);
    }
  }
  carrying_out_ = false;
}

void Node::carry_out(const membership::StartGroup& action) {
  const auto found = registry_.groups().find(action.group_id);
  if (found == registry_.groups().end()) return;
  const membership::Group& group = found->second;
  abi::GroupBegin begin{};
  begin.group_id = group.id;
  begin.epoch = group.epoch;
  begin.resume_index = group.resume_index;
  const abi::GroupSettings settings = group_settings(group, action.device);
  begin.sms = settings.sms;
  begin.priority = settings.priority;
  begin.broken = action.broken ? 1 : 0;
  begin.shape = group.shape;
  abi::set_text(begin.name, group.name.data(), group.name.size());
  fleet_->send(action.device, abi::LinkType::kGroupBegin, begin);
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const auto member = group.members.find(rank);
    send_rank(action.device, group, rank, member != group.members.end() ? member->second.active_since : 0);
  }
  for (const auto& [rank, member] : group.members) {
    if (member.device == action.device && member.announced) send_member(group, member);
  }
  fleet_->send(action.device, abi::LinkType::kGroupCommit, abi::GroupRef{group.id});
}

void Node::send_rank(std::uint32_t device, const membership::Group& group, std::uint32_t rank,
                     std::uint64_t active_since) {
  const MemberArenas* arenas = arenas_.find(group.id, rank);
  if (active_since == 0 || arenas == nullptr) {
    fleet_->send(device, abi::LinkType::kGroupRank, abi::GroupRank{group.id, rank, 0, 0});
    return;
  }
  const std::uint32_t its_device = group.members.at(rank).device;
  std::vector<int> fds = {arenas->user.get(), arenas->exchange.get(), fleet_->bell_fd(its_device),
                          fleet_->page_fd(its_device)};
  if (arenas->wanted.memory != nullptr) {
    for (const UniqueFd& fd : *arenas->wanted.memory) fds.push_back(fd.get());
  }
  fleet_->send(device, abi::LinkType::kGroupRank,
               abi::GroupRank{group.id, rank, its_device, active_since, its_device == device ? 1u : 0u, 0,
                              arenas->wanted.bindings},
               std::move(fds));
}

void Node::send_member(const membership::Group& group, const membership::Member& member) {
  const MemberArenas* arenas = arenas_.find(group.id, member.rank);
  if (arenas == nullptr) return;
  fleet_->send(member.device, abi::LinkType::kGroupMember,
               abi::GroupMember{group.id, member.session_id, member.rank, member.member, member.first_index,
                                member.commands ? 1u : 0u, 0},
               {arenas->board.get()});
}

void Node::carry_out(const membership::SendRank& action) {
  const auto group = registry_.groups().find(action.group_id);
  if (group == registry_.groups().end()) return;
  const bool known = group->second.members.count(action.rank) == 1;
  send_rank(action.device, group->second, action.rank, known ? action.active_since : 0);
}

void Node::carry_out(const membership::SendMember& action) {
  const auto group = registry_.groups().find(action.group_id);
  if (group == registry_.groups().end()) return;
  const auto member = group->second.members.find(action.rank);
  if (member != group->second.members.end()) send_member(group->second, member->second);
}

void Node::carry_out(const membership::SendStopMember& action) {
  fleet_->send(action.device, abi::LinkType::kStopMember, action.message);
}

void Node::carry_out(const membership::SendBreak& action) {
  const abi::Break& m = action.message;
  // Once for the group, not once for each engine and not for a fatal break that takes more with it.
  const std::tuple now_logged(m.group_id, m.epoch, m.fatal);
  if (now_logged != last_break_) {
    last_break_ = now_logged;
    const auto group = registry_.groups().find(m.group_id);
    const bool known = group != registry_.groups().end();
    // A program that ends as it should is nothing to be warned of.
    const bool orderly = known && group->second.reason.orderly;
    record_of_user(known ? EventOwner{group->second.uid} : kDaemonOwner, EventKind::kGroupBroke,
                   orderly ? LogLevel::kInfo : LogLevel::kWarning, "group breaks",
                   {{"group", m.group_id},
                    {"name", known ? group->second.name : ""},
                    {"epoch", m.epoch},
                    {"fatal", m.fatal != 0},
                    {"cause", status_name(m.cause)},
                    {"culprit_rank", m.culprit_rank},
                    {"text", m.text}});
  }
  fleet_->send(action.device, abi::LinkType::kBreak, m);
}

void Node::carry_out(const membership::SendRelease& action) {
  fleet_->send(action.device, abi::LinkType::kRelease, action.message);
}

void Node::carry_out(const membership::SendResume& action) {
  const std::pair now_logged(action.message.group_id, action.message.epoch);
  if (now_logged != last_resume_) {
    last_resume_ = now_logged;
    const auto group = registry_.groups().find(action.message.group_id);
    const bool known = group != registry_.groups().end();
    record_of_user(known ? EventOwner{group->second.uid} : kDaemonOwner, EventKind::kGroupResumed,
                   LogLevel::kInfo, "group goes on",
                   {{"group", action.message.group_id},
                    {"name", known ? group->second.name : ""},
                    {"epoch", action.message.epoch},
                    {"resume_index", action.message.resume_index}});
  }
  fleet_->send(action.device, abi::LinkType::kResume, action.message);
}

void Node::carry_out(const membership::SendRemoveGroup& action) {
  fleet_->send(action.device, abi::LinkType::kRemoveGroup, action.message);
}

void Node::carry_out(const membership::CloseStreams& action) {
  const MemberArenas* arenas = arenas_.find(action.group_id, action.rank);
  if (arenas == nullptr) return;
  fleet_->send(action.device, abi::LinkType::kCloseStreams, arenas->streams(), {arenas->user.get()});
}

void Node::carry_out(const membership::KillEngine& action) {
  fleet_->kill_unless_stopped(action.device, action.text);
}

void Node::carry_out(const membership::ReplyJoined& action) {
  const MemberArenas* arenas = arenas_.find(action.message.group_id, action.message.rank);
  if (arenas == nullptr) return;  // the session closed meanwhile
  Result<UniqueFd> board = reopen_read_only(arenas->board.get());
  if (!board.ok()) {
    // Without its answer the client can't go on; its end ends the membership. Later: that decides more.
    loop_->post([this, id = action.session_id, status = board.status()] { sessions_->end(id, status); });
    return;
  }
  const auto group = registry_.groups().find(action.message.group_id);
  const bool known = group != registry_.groups().end();
  record_of_user(known ? EventOwner{group->second.uid} : kDaemonOwner, EventKind::kRankJoined,
                 LogLevel::kInfo, "rank joined",
                 {{"group", action.message.group_id},
                  {"name", known ? group->second.name : ""},
                  {"rank", action.message.rank},
                  {"session", action.session_id}});
  sessions_->reply(action.session_id, action.request_id, abi::AttachType::kJoined, action.message,
                   {arenas->user.get(), board->get()});
}

void Node::carry_out(const membership::ReplyLeft& action) {
  sessions_->reply(action.session_id, action.request_id, abi::AttachType::kLeft, action.message);
}

void Node::carry_out(const membership::ReplyRefused& action) {
  const Session* session = sessions_->find(action.session_id);
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "request refused",
                 {{"session", action.session_id}, {"reason", action.status.to_string()}},
                 session == nullptr ? kDaemonOwner : EventOwner{session->peer.uid});
  sessions_->refuse(action.session_id, action.request_id, action.status);
}

void Node::carry_out(const membership::WakeSession& action) {
  sessions_->ring(action.session_id);
}

}  // namespace epd
