#include "orders.h"

#include "base/event.h"
#include "loop.h"
#include "member_memory_store.h"

namespace epd {

void Orders::carry_out_all() {
  EPD_CHECK(!std::exchange(carrying_out_, true));
  for (membership::Actions actions = rooms_.registry.take_actions(); !actions.empty();
       actions = rooms_.registry.take_actions()) {
    for (const membership::Action& action : actions) {
      if (log_enabled(LogLevel::kDebug))
        log_event(LogLevel::kDebug, "membership action", {{"action", to_string(action)}});
      std::visit([this](const auto& what) { carry_out(what); }, action);
    }
  }
  carrying_out_ = false;
}

void Orders::add_session(const Session& session) {
  send(session.device, abi::LinkType::kAddSession,
       abi::AddSession{session.id, session.peer.uid, session.peer.pid},
       {session.segments.a.get(), session.segments.b.get(), session.segments.ring_client.get()});
}

void Orders::refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status) {
  carry_out(membership::ReplyRefused{session_id, request_id, status});
}

void Orders::carry_out(const membership::StartGroup& action) {
  const membership::Group* found = find_group(action.group_id);
  if (found == nullptr) return;
  const membership::Group& group = *found;
  abi::GroupBegin begin{};
  begin.group_id = group.id;
  begin.epoch = group.epoch;
  begin.resume_index = group.resume_index;
  const abi::GroupSettings settings = settings_.of_group(group, action.device);
  begin.sms = settings.sms;
  begin.priority = settings.priority;
  begin.broken = action.broken ? 1 : 0;
  begin.shape = group.shape;
  abi::set_text(begin.name, group.name.data(), group.name.size());
  rooms_.fleet.send(action.device, abi::LinkType::kGroupBegin, begin);
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const auto member = group.members.find(rank);
    send_rank(action.device, group, rank, member != group.members.end() ? member->second.active_since : 0);
  }
  for (const auto& [rank, member] : group.members) {
    if (member.device == action.device && member.announced) send_member(group, member);
  }
  rooms_.fleet.send(action.device, abi::LinkType::kGroupCommit, abi::GroupRef{group.id});
}

const membership::Group* Orders::find_group(std::uint64_t group_id) const {
  const auto found = rooms_.registry.groups().find(group_id);
  return found == rooms_.registry.groups().end() ? nullptr : &found->second;
}

void Orders::send_rank(std::uint32_t device, const membership::Group& group, std::uint32_t rank,
                       std::uint64_t active_since) {
  const MemberArenas* arenas = rooms_.memory.find(group.id, rank);
  if (active_since == 0 || arenas == nullptr) {
    rooms_.fleet.send(device, abi::LinkType::kGroupRank, abi::GroupRank{group.id, rank, 0, 0});
    return;
  }
  const std::uint32_t its_device = group.members.at(rank).device;
  std::vector<int> fds = {arenas->user.get(), arenas->exchange.get(), rooms_.fleet.bell_fd(its_device),
                          rooms_.fleet.page_fd(its_device)};
  if (arenas->wanted.memory != nullptr) {
    for (const UniqueFd& fd : *arenas->wanted.memory) fds.push_back(fd.get());
  }
  rooms_.fleet.send(device, abi::LinkType::kGroupRank,
                    abi::GroupRank{group.id, rank, its_device, active_since, its_device == device ? 1u : 0u,
                                   0, arenas->wanted.bindings},
                    fds);
}

void Orders::send_member(const membership::Group& group, const membership::Member& member) {
  const MemberArenas* arenas = rooms_.memory.find(group.id, member.rank);
  if (arenas == nullptr) return;
  std::vector<int> fds = {arenas->board.get()};
  if (arenas->results.get() >= 0) fds.push_back(arenas->results.get());
  rooms_.fleet.send(
      member.device, abi::LinkType::kGroupMember,
      abi::GroupMember{group.id, member.session_id, member.rank, member.member, member.first_index}, fds);
}

void Orders::carry_out(const membership::SendRank& action) {
  const membership::Group* group = find_group(action.group_id);
  if (group == nullptr) return;
  const bool known = group->members.count(action.rank) == 1;
  send_rank(action.device, *group, action.rank, known ? action.active_since : 0);
}

void Orders::carry_out(const membership::SendMember& action) {
  const membership::Group* group = find_group(action.group_id);
  if (group == nullptr) return;
  const auto member = group->members.find(action.rank);
  if (member != group->members.end()) send_member(*group, member->second);
}

void Orders::carry_out(const membership::SendStopMember& action) {
  rooms_.fleet.send(action.device, abi::LinkType::kStopMember, action.message);
}

void Orders::carry_out(const membership::SendBreak& action) {
  const abi::Break& m = action.message;
  // Once for the group, not once for each engine and not for a fatal break that takes more with it.
  const std::tuple now_logged(m.group_id, m.epoch, m.fatal);
  if (now_logged != last_break_) {
    last_break_ = now_logged;
    const membership::Group* group = find_group(m.group_id);
    // A program that ends as it should is nothing to be warned of.
    const bool orderly = group != nullptr && group->reason.orderly;
    record_of_user(group != nullptr ? EventOwner{group->uid} : kDaemonOwner, EventKind::kGroupBroke,
                   orderly ? LogLevel::kInfo : LogLevel::kWarning, "group breaks",
                   {{"group", m.group_id},
                    {"name", group != nullptr ? group->name : ""},
                    {"epoch", m.epoch},
                    {"fatal", m.fatal != 0},
                    {"cause", status_name(m.cause)},
                    {"culprit_rank", m.culprit_rank},
                    {"text", m.text}});
  }
  rooms_.fleet.send(action.device, abi::LinkType::kBreak, m);
}

void Orders::carry_out(const membership::SendRelease& action) {
  rooms_.fleet.send(action.device, abi::LinkType::kRelease, action.message);
}

void Orders::carry_out(const membership::SendResume& action) {
  const std::pair now_logged(action.message.group_id, action.message.epoch);
  if (now_logged != last_resume_) {
    last_resume_ = now_logged;
    const membership::Group* group = find_group(action.message.group_id);
    record_of_user(group != nullptr ? EventOwner{group->uid} : kDaemonOwner, EventKind::kGroupResumed,
                   LogLevel::kInfo, "group goes on",
                   {{"group", action.message.group_id},
                    {"name", group != nullptr ? group->name : ""},
                    {"epoch", action.message.epoch},
                    {"resume_index", action.message.resume_index}});
  }
  rooms_.fleet.send(action.device, abi::LinkType::kResume, action.message);
}

void Orders::carry_out(const membership::SendRemoveGroup& action) {
  rooms_.fleet.send(action.device, abi::LinkType::kRemoveGroup, action.message);
}

void Orders::carry_out(const membership::CloseStreams& action) {
  const MemberArenas* arenas = rooms_.memory.find(action.group_id, action.rank);
  if (arenas == nullptr) return;
  rooms_.fleet.send(action.device, abi::LinkType::kCloseStreams, arenas->streams(), {arenas->user.get()});
}

void Orders::carry_out(const membership::KillEngine& action) {
  rooms_.fleet.kill_unless_stopped(action.device, action.text);
}

void Orders::carry_out(const membership::ReplyJoined& action) {
  const MemberArenas* arenas = rooms_.memory.find(action.message.group_id, action.message.rank);
  if (arenas == nullptr) return;  // the session closed meanwhile
  Result<UniqueFd> board = reopen_read_only(arenas->board.get());
  if (!board.ok()) {
    // Without its answer the client can't go on; its end ends the membership. Later: that decides more.
    rooms_.loop.post(
        [this, id = action.session_id, status = board.status()] { rooms_.sessions.end(id, status); });
    return;
  }
  const membership::Group* group = find_group(action.message.group_id);
  record_of_user(group != nullptr ? EventOwner{group->uid} : kDaemonOwner, EventKind::kRankJoined,
                 LogLevel::kInfo, "rank joined",
                 {{"group", action.message.group_id},
                  {"name", group != nullptr ? group->name : ""},
                  {"rank", action.message.rank},
                  {"session", action.session_id}});
  std::vector<int> fds = {arenas->user.get(), board->get()};
  if (arenas->results.get() >= 0) fds.push_back(arenas->results.get());
  rooms_.sessions.reply(action.session_id, action.request_id, abi::AttachType::kJoined, action.message, fds);
}

void Orders::carry_out(const membership::ReplyLeft& action) {
  rooms_.sessions.reply(action.session_id, action.request_id, abi::AttachType::kLeft, action.message);
}

void Orders::carry_out(const membership::ReplyRefused& action) {
  const Session* session = rooms_.sessions.find(action.session_id);
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "request refused",
                 {{"session", action.session_id}, {"reason", action.status.to_string()}},
                 session == nullptr ? kDaemonOwner : EventOwner{session->peer.uid});
  rooms_.sessions.refuse(action.session_id, action.request_id, action.status);
}

void Orders::carry_out(const membership::WakeSession& action) {
  rooms_.sessions.ring(action.session_id);
}

}  // namespace epd
