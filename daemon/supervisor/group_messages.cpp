// Carries out what the registry decides.
#include "base/event.h"
#include "node.h"

namespace epd {

void Node::carry_out_actions() {
  for (membership::Actions actions = registry_.take_actions(); !actions.empty();
       actions = registry_.take_actions()) {
    for (const membership::Action& action : actions) {
      if (log_enabled(LogLevel::kDebug))
        log_event(LogLevel::kDebug, "membership action", {{"action", to_string(action)}});
      std::visit([this](const auto& what) { carry_out(what); }, action);
    }
  }
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
  for (const auto& [rank, member] : group.members) {
    const MemberArenas* arenas = arenas_.find(group.id, rank);
    if (arenas == nullptr) return;  // the group has ended meanwhile; its removal follows
    fleet_->send(action.device, abi::LinkType::kGroupRank, abi::GroupRank{group.id, rank, member.device, 1},
                 {arenas->user.get(), arenas->exchange.get(), fleet_->bell_fd(member.device),
                  fleet_->page_fd(member.device)});
  }
  for (const auto& [rank, member] : group.members) {
    if (member.device != action.device) continue;
    fleet_->send(action.device, abi::LinkType::kGroupMember,
                 abi::GroupMember{group.id, member.session_id, rank, member.member, 0},
                 {arenas_.find(group.id, rank)->board.get()});
  }
  fleet_->send(action.device, abi::LinkType::kGroupCommit, abi::GroupRef{group.id});
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
    record_event(EventKind::kGroupBroke, LogLevel::kWarning, "group breaks",
                 {{"group", m.group_id},
                  {"epoch", m.epoch},
                  {"fatal", m.fatal != 0},
                  {"cause", status_name(m.cause)},
                  {"culprit_rank", m.culprit_rank},
                  {"text", m.text}});
  }
  fleet_->send(action.device, abi::LinkType::kBreak, m);
}

void Node::carry_out(const membership::SendResume& action) {
  const std::pair now_logged(action.message.group_id, action.message.epoch);
  if (now_logged != last_resume_) {
    last_resume_ = now_logged;
    record_event(EventKind::kGroupResumed, LogLevel::kInfo, "group goes on",
                 {{"group", action.message.group_id},
                  {"epoch", action.message.epoch},
                  {"resume_index", action.message.resume_index}});
  }
  fleet_->send(action.device, abi::LinkType::kResume, action.message);
}

void Node::carry_out(const membership::SendRemoveGroup& action) {
  fleet_->send(action.device, abi::LinkType::kRemoveGroup, action.message);
}

void Node::carry_out(const membership::KillEngine& action) {
  fleet_->kill(action.device, action.text);
}

void Node::carry_out(const membership::ReplyJoined& action) {
  const MemberArenas* arenas = arenas_.find(action.message.group_id, action.message.rank);
  if (arenas == nullptr) return;  // the session closed meanwhile
  Result<UniqueFd> board = reopen_read_only(arenas->board.get());
  if (!board.ok()) {
    // Without its answer the client can't go on; its end ends the membership.
    sessions_->end(action.session_id, board.status());
    return;
  }
  record_event(
      EventKind::kRankJoined, LogLevel::kInfo, "rank joined",
      {{"group", action.message.group_id}, {"rank", action.message.rank}, {"session", action.session_id}});
  sessions_->reply(action.session_id, action.request_id, abi::AttachType::kJoined, action.message,
                   {arenas->user.get(), board->get()});
}

void Node::carry_out(const membership::ReplyLeft& action) {
  sessions_->reply(action.session_id, action.request_id, abi::AttachType::kLeft, action.message);
}

void Node::carry_out(const membership::ReplyRefused& action) {
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "request refused",
                 {{"session", action.session_id}, {"reason", action.status.to_string()}});
  sessions_->refuse(action.session_id, action.request_id, action.status);
}

void Node::carry_out(const membership::WakeSession& action) {
  const Session* session = sessions_->find(action.session_id);
  if (session != nullptr) wake_client(session->segments);
}

}  // namespace epd
