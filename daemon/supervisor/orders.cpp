#include "orders.h"

#include "base/event.h"
#include "loop.h"
#include "member_memory_store.h"
#include "membership/deciders.h"

#include <algorithm>
#include <cstring>

namespace epd::supervisor {

bool Orders::carry_out_all() {
  EPD_CHECK(!std::exchange(carrying_out_, true));
  bool any = false;
  for (membership::Actions actions = rooms_.deciders.take_actions(); !actions.empty();
       actions = rooms_.deciders.take_actions()) {
    any = true;
    for (const membership::Action& action : actions) {
      if (log_enabled(LogLevel::kDebug))
        log_event(LogLevel::kDebug, "membership action", {{"action", to_string(action)}});
      std::visit([this](const auto& what) { carry_out(what); }, action);
    }
  }
  carrying_out_ = false;
  return any;
}

void Orders::add_session(const session::Session& session) {
  send(session.device, abi::LinkType::kAddSession,
       abi::AddSession{session.id, session.peer.uid, session.peer.pid},
       {session.segments.a.get(), session.segments.b.get(), session.segments.ring_client.get()});
}

void Orders::carry_out(const membership::StartGroup& action) {
  const membership::GroupDescription& group = action.group;
  const std::uint32_t device = action.engine.device;
  for (const membership::FarEngine& far : group.far_engines) send_far_engine(device, far);
  abi::GroupBegin begin{};
  begin.group_id = group.label.id;
  begin.epoch = group.epoch;
  begin.resume_index = group.resume_index;
  const abi::GroupSettings settings = settings_.of_group(group.settings);
  begin.sms = settings.sms;
  begin.priority = settings.priority;
  begin.own_linger = settings.own_linger;
  begin.linger_us = settings.linger_us;
  begin.broken = action.broken ? 1 : 0;
  begin.node = action.engine.node;
  begin.view = group.view;
  begin.epoch_key[0] = group.epoch_key.high;
  begin.epoch_key[1] = group.epoch_key.low;
  begin.shape = group.shape;
  abi::set_text(begin.name, group.label.name.data(), group.label.name.size());
  rooms_.fleet[device].send(abi::LinkType::kGroupBegin, begin);
  for (const membership::RankDescription& rank : group.ranks) send_rank(action.engine, begin.group_id, rank);
  for (const membership::MemberDescription& member : group.members)
    send_member(device, begin.group_id, member);
  rooms_.fleet[device].send(abi::LinkType::kGroupCommit, abi::GroupRef{begin.group_id});
}

void Orders::send_far_engine(std::uint32_t device, const membership::FarEngine& far) {
  abi::FarEngine message{};
  message.node = far.engine.node;
  message.device_index = far.engine.device;
  abi::set_text(message.node_name, far.node.data(), far.node.size());
  message.address_bytes = static_cast<std::uint32_t>(std::min(far.address.size(), sizeof(message.address)));
  std::memcpy(message.address, far.address.data(), message.address_bytes);
  rooms_.fleet[device].send(abi::LinkType::kFarEngine, message);
}

void Orders::carry_out(const membership::SendFarEngine& action) {
  send_far_engine(action.engine.device, action.far);
}

void Orders::send_rank(membership::EngineId to, std::uint64_t group_id,
                       const membership::RankDescription& rank) {
  if (rank.active_since != 0 && rank.engine.node != to.node) {
    rooms_.fleet[to.device].send(
        abi::LinkType::kGroupRank,
        abi::GroupRank{group_id, rank.rank, rank.engine.device, rank.active_since, rank.engine.node});
    return;
  }
  const MemberArenas* arenas = rooms_.memory.find(group_id, rank.rank);
  if (rank.active_since == 0 || arenas == nullptr) {
    rooms_.fleet[to.device].send(abi::LinkType::kGroupRank, abi::GroupRank{group_id, rank.rank, 0, 0});
    return;
  }
  const std::uint32_t its_device = rank.engine.device;
  const std::vector<int> fds = {arenas->user.get(), arenas->exchange.get(),
                                rooms_.fleet[its_device].memory().bell_fd(),
                                rooms_.fleet[its_device].memory().page_fd()};
  rooms_.fleet[to.device].send(abi::LinkType::kGroupRank,
                               abi::GroupRank{group_id, rank.rank, its_device, rank.active_since, to.node},
                               fds);
  for (const auto& [number, mapped] : arenas->mapped) {
    rooms_.fleet[to.device].send(
        abi::LinkType::kMapMemory,
        abi::GroupMemory{group_id, rank.rank, rank.engine == to ? 1u : 0u, mapped.range}, mapped.fds());
  }
}

void Orders::send_member(std::uint32_t device, std::uint64_t group_id,
                         const membership::MemberDescription& member) {
  const MemberArenas* arenas = rooms_.memory.find(group_id, member.rank);
  if (arenas == nullptr) return;
  const std::vector<int> fds = {arenas->board.get(), arenas->results.get()};
  rooms_.fleet[device].send(
      abi::LinkType::kGroupMember,
      abi::GroupMember{group_id, member.session.number, member.rank, member.member, member.first_index}, fds);
}

void Orders::carry_out(const membership::SendRank& action) {
  send_rank(action.engine, action.group_id, action.rank);
}

void Orders::carry_out(const membership::SendMember& action) {
  send_member(action.engine.device, action.group_id, action.member);
}

void Orders::carry_out(const membership::SendStopMember& action) {
  rooms_.fleet[action.engine.device].send(abi::LinkType::kStopMember, action.message);
}

// Not once for each engine, and not again for a fatal break that follows from another.
void Orders::tell_break(const membership::GroupLabel& group, const abi::Break& message, bool orderly) {
  const auto exists = [this](std::uint64_t id) { return rooms_.deciders.find(id) != nullptr; };
  if (!told_breaks_.tell(message, rooms_.deciders.num_groups(), exists)) return;
  // A program that ends as it should is no reason for a warning, and its group does not break.
  if (orderly && message.fatal != 0) {
    record_of_user(
        group.uid, EventKind::kGroupEnded, LogLevel::kInfo, "group ends",
        {{"group", group.id}, {"name", group.name}, {"epoch", message.epoch}, {"text", message.text}});
    return;
  }
  record_of_user(group.uid, EventKind::kGroupBroke, orderly ? LogLevel::kInfo : LogLevel::kWarning,
                 "group breaks",
                 {{"group", group.id},
                  {"name", group.name},
                  {"epoch", message.epoch},
                  {"fatal", message.fatal != 0},
                  {"cause", status_name(message.cause)},
                  {"failed_rank", message.failed_rank},
                  {"text", message.text}});
}

void Orders::carry_out(const membership::SendBreak& action) {
  tell_break(action.group, action.message, action.orderly);
  rooms_.fleet[action.engine.device].send(abi::LinkType::kBreak, action.message);
}

void Orders::carry_out(const membership::SendRelease& action) {
  rooms_.fleet[action.engine.device].send(abi::LinkType::kRelease, action.message);
}

void Orders::carry_out(const membership::SendResume& action) {
  const std::pair now_logged(action.message.group_id, action.message.epoch);
  if (now_logged != last_resume_) {
    last_resume_ = now_logged;
    record_of_user(action.group.uid, EventKind::kGroupResumed, LogLevel::kInfo, "group resumed",
                   {{"group", action.message.group_id},
                    {"name", action.group.name},
                    {"epoch", action.message.epoch},
                    {"resume_op", action.message.resume_index}});
  }
  abi::Resume message = action.message;
  message.epoch_key[0] = action.epoch_key.high;
  message.epoch_key[1] = action.epoch_key.low;
  rooms_.fleet[action.engine.device].send(abi::LinkType::kResume, message);
}

void Orders::carry_out(const membership::SendRemoveGroup& action) {
  rooms_.fleet[action.engine.device].send(abi::LinkType::kRemoveGroup, action.message);
}

void Orders::carry_out(const membership::CloseStreams& action) {
  if (action.later) {
    rooms_.memory.close_streams_later(action);
    return;
  }
  const MemberArenas* arenas = rooms_.memory.find(action.group_id, action.rank);
  if (arenas == nullptr) return;
  rooms_.fleet[action.engine.device].send(abi::LinkType::kCloseStreams, arenas->streams(),
                                          {arenas->user.get()});
}

void Orders::carry_out(const membership::KillEngine& action) {
  rooms_.fleet[action.engine.device].kill_unless_stopped(action.text);
}

// The answer is given in the same turn: on one node a rank that joins counts at once.
void Orders::carry_out(const membership::AcquireMemory& action) {
  rooms_.deciders.handle(membership::MemoryAcquired{action.request, action.group_id, action.rank,
                                                    rooms_.memory.acquire(action)});
}

void Orders::carry_out(const membership::ReleaseMemory& action) {
  if (const MemberArenas* arenas = rooms_.memory.find(action.group_id, action.rank); arenas != nullptr) {
    for (const auto& [number, mapped] : arenas->mapped) {
      if (mapped.request != 0)
        rooms_.sessions.refuse(arenas->wanted.session, mapped.request,
                               {StatusCode::kAborted, "the rank has left its group"});
    }
  }
  rooms_.memory.release(action);
}

void Orders::carry_out(const membership::MarkLost& action) {
  rooms_.memory.mark_lost(action);
}

void Orders::carry_out(const membership::ReplyJoined& action) {
  const std::uint64_t session_id = action.request.session.number;
  if (action.message.kept != 0) {
    rooms_.sessions.reply(session_id, action.request.number, abi::AttachType::kJoined, action.message);
    return;
  }
  const MemberArenas* arenas = rooms_.memory.find(action.message.group_id, action.message.rank);
  if (arenas == nullptr) return;  // the session closed meanwhile
  Result<UniqueFd> board = reopen_read_only(arenas->board.get());
  const bool host = arenas->device.kind == abi::DeviceKind::kHost;
  Result<UniqueFd> results = host && board.ok() ? reopen_read_only(arenas->results.get()) : UniqueFd();
  if (!board.ok() || !results.ok()) {
    // Without its answer the client can't continue. Its end ends the membership. That is done later, because
    // it leads to more decisions.
    rooms_.loop.post([this, session_id, status = board.ok() ? results.status() : board.status()] {
      rooms_.sessions.end(session_id, status);
    });
    return;
  }
  record_of_user(action.group.uid, EventKind::kRankJoined, LogLevel::kInfo, "rank joined",
                 {{"group", action.group.id},
                  {"name", action.group.name},
                  {"rank", action.message.rank},
                  {"session", session_id}});
  const std::vector<int> fds = {arenas->user.get(), board->get(),
                                host ? results->get() : arenas->results.get()};
  rooms_.sessions.reply(session_id, action.request.number, abi::AttachType::kJoined, action.message, fds);
}

void Orders::carry_out(const membership::ReplyLeft& action) {
  rooms_.sessions.reply(action.request.session.number, action.request.number, abi::AttachType::kLeft,
                        action.message);
}

void Orders::carry_out(const membership::ReplyRefused& action) {
  refuse(action.request.session.number, action.request.number, action.status);
}

void Orders::refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status) {
  const session::Session* session = rooms_.sessions.find(session_id);
  static LogLimiter limiter;
  // Somebody who leaves what an operator has taken from him, or what has ended, has done nothing wrong.
  if (status.code() != StatusCode::kNotFound)
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "request refused",
                   {{"session", session_id},
                    {"uid", session == nullptr ? 0 : session->peer.uid},
                    {"pid", session == nullptr ? 0 : session->peer.pid},
                    {"reason", status.to_string()}},
                   session == nullptr ? kDaemonOwner : EventOwner{session->peer.uid});
  rooms_.sessions.refuse(session_id, request_id, status);
}

void Orders::carry_out(const membership::WakeSession& action) {
  rooms_.sessions.ring(action.session.number);
}

}  // namespace epd::supervisor
