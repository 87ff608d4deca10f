// Engine: the supervisor's messages. Both ends of the link are ours; a message that makes no sense
// is reported and, since nothing can be trusted then, ends the engine, which the supervisor restarts.

#include "base/log.h"
#include "commands.h"
#include "engine.h"
#include "proto/binding_rules.h"

#include <cstring>

namespace epd {

using abi::LinkType;

void Engine::send_bytes(LinkType type, const void* body, std::size_t bytes) {
  Packet packet;
  packet.header.type = static_cast<std::uint16_t>(type);
  packet.body_bytes = bytes;
  std::memcpy(packet.body.data(), body, bytes);
  link_backlog_.push_back(std::move(packet));
  flush_link();
}

void Engine::say_device_failed() {
  flush_link();
  // If there is no room, the end of the process will tell.
  if (link_backlog_.empty())
    (void)send_packet(link_.get(), static_cast<std::uint16_t>(LinkType::kDeviceFailed), 0, nullptr, 0);
}

void Engine::flush_link() {
  while (!link_backlog_.empty()) {
    const Packet& packet = link_backlog_.front();
    const Status sent =
        send_packet(link_.get(), packet.header.type, 0, packet.body.data(), packet.body_bytes);
    if (sent.code() == StatusCode::kWouldBlock) return;
    link_backlog_.pop_front();  // a failure means that the supervisor is gone; the loop will see it
  }
}

void Engine::handle_link() {
  flush_link();
  Packet packet;
  Status error;
  while (!stop_) {
    switch (receive_packet(link_.get(), packet, error)) {
      case ReceiveResult::kNothing: return;
      case ReceiveResult::kClosed:
        stop_ = true;  // the supervisor is gone: so are the owners of all memory
        exit_code_ = 1;
        return;
      case ReceiveResult::kMalformed:
        log_event(LogLevel::kError, "malformed link message", {{"error", error.to_string()}});
        stop_ = true;
        exit_code_ = 2;
        return;
      case ReceiveResult::kPacket: handle_message(packet); break;
    }
  }
}

namespace {

// Reads the body as T and calls `handler` with it.
template <typename T, typename Handler>
Status with_body(const Packet& packet, Handler handler) {
  const Result<T> body = packet.read<T>();
  return body.ok() ? handler(body.value()) : body.status();
}

}  // namespace

void Engine::handle_message(Packet& packet) {
  Status status;
  const auto type = static_cast<LinkType>(packet.header.type);
  switch (type) {
    case LinkType::kAddSession: status = add_session(packet); break;
    case LinkType::kGroupRank: status = add_rank(packet); break;
    case LinkType::kGroupMember: status = add_member(packet); break;
    case LinkType::kCloseCommands: status = close_commands(packet); break;
    case LinkType::kRemoveSession:
      status = with_body<abi::SessionRef>(packet, [this](const auto& m) { return remove_session(m); });
      break;
    case LinkType::kGroupBegin:
      status = with_body<abi::GroupBegin>(packet, [this](const auto& m) { return begin_group(m); });
      break;
    case LinkType::kGroupCommit:
      status = with_body<abi::GroupRef>(packet, [this](const auto& m) { return commit_group(m); });
      break;
    case LinkType::kStopMember:
      status = with_body<abi::MemberRef>(packet, [this](const auto& m) { return stop_member(m); });
      break;
    case LinkType::kBreak:
      status = with_body<abi::Break>(packet, [this](const auto& m) { return break_group(m); });
      break;
    case LinkType::kResume:
      status = with_body<abi::Resume>(packet, [this](const auto& m) { return resume_group(m); });
      break;
    case LinkType::kRelease:
      status = with_body<abi::GroupRef>(packet, [this](const auto& m) { return release_group(m); });
      break;
    case LinkType::kRemoveGroup:
      status = with_body<abi::GroupRef>(packet, [this](const auto& m) { return remove_group(m); });
      break;
    case LinkType::kSettings:
      status = with_body<abi::Settings>(packet, [this](const auto& m) { return apply_settings(m); });
      break;
    case LinkType::kGroupSettings:
      status =
          with_body<abi::GroupSettings>(packet, [this](const auto& m) { return apply_group_settings(m); });
      break;
    case LinkType::kStop: stop_ = true; break;
    default: status = invalid_argument("link message type " + std::to_string(packet.header.type)); break;
  }
  if (status.ok()) return;
  log_event(LogLevel::kError, "link message refused",
            {{"type", packet.header.type}, {"error", status.to_string()}});
  stop_ = true;
  exit_code_ = 2;
}

Group* Engine::find_group(std::uint64_t id) {
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.get();
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
      SessionPort::open(id, std::move(packet.fds[0]), std::move(packet.fds[1]), std::move(packet.fds[2]));
  if (!port.ok()) {
    abi::SessionFailed failed{id, port.status().code(), {}};
    abi::set_text(failed.text, port.status().message().data(), port.status().message().size());
    send(LinkType::kSessionFailed, failed);
    return {};
  }
  watch((*port)->doorbell(), id);
  (*port)->statistics = Statistics::of_session(page_, id);
  sessions_[id] = std::move(port).value();
  return {};
}

Status Engine::remove_session(const abi::SessionRef& message) {
  check_device_often();
  const auto found = sessions_.find(message.session_id);
  if (found == sessions_.end()) {
    send(LinkType::kSessionRemoved, message);  // never got this far, or failed to open
  } else {
    found->second->removing = true;
  }
  return {};
}

Status Engine::begin_group(const abi::GroupBegin& message) {
  if (find_group(message.group_id) != nullptr)
    return invalid_argument("group " + std::to_string(message.group_id) + " twice");
  auto group = std::make_unique<Group>();
  group->id = message.group_id;
  group->name.assign(message.name, abi::text_length(message.name));
  group->set_shape(message.shape);
  group->sms = message.sms;
  group->priority = message.priority;
  group->epoch = message.epoch;
  group->resume_index = message.resume_index;
  group->starts_broken = message.broken != 0;
  groups_[message.group_id] = std::move(group);
  return {};
}

Status Engine::add_rank(Packet& packet) {
  const Result<abi::GroupRank> body = packet.read<abi::GroupRank>();
  if (!body.ok()) return body.status();
  const abi::GroupRank& message = body.value();
  Group* group = find_group(message.group_id);
  const bool changeable = group != nullptr && !group->starts_owed &&
                          (group->phase == GroupPhase::kStarting ||
                           (group->phase == GroupPhase::kBreaking && group->break_acked));
  const bool fits = message.active_since != 0 ? packet.fds.size() >= abi::kRankFds : packet.fds.empty();
  if (!changeable || message.rank >= group->shape.num_ranks || !fits) {
    return invalid_argument("kGroupRank for group " + std::to_string(message.group_id) + " rank " +
                            std::to_string(message.rank) + " with " + std::to_string(packet.fds.size()) +
                            " descriptors");
  }
  // One that came while this engine was being told of the group is told of again: the same memory, which a
  // kernel may look at.
  if (message.active_since != 0 && group->active_since[message.rank] == message.active_since) return {};
  group->refused.erase(message.rank);
  drop_member(*group, message.rank);
  if (message.active_since == 0) {
    group->set_active(message.rank, 0);
    return {};
  }
  if (Status status = map_rank(*group, message, packet); !status.ok()) return status;
  if (Status status = map_client_memory(*group, message, packet); !status.ok()) {
    refuse_rank(*group, message.rank, status);
    return {};
  }
  group->ranks[message.rank].place_regions(group->shape, message.bindings);
  group->set_active(message.rank, message.active_since);
  for (const auto& peer : group->peers) {
    if (peer->device_index == message.device_index) return {};
  }
  Result<Mapping> page = Mapping::map(packet.fds[3].get(), sizeof(abi::EnginePage), Access::kReadOnly);
  if (!page.ok()) return page.status();
  auto peer = std::make_unique<PeerEngine>();
  peer->device_index = message.device_index;
  peer->bell = std::move(packet.fds[2]);
  peer->page = std::move(page).value();
  group->peers.push_back(std::move(peer));
  return {};
}

// What the supervisor has made: that it can't be mapped is no client's fault.
Status Engine::map_rank(Group& group, const abi::GroupRank& message, const Packet& packet) {
  const abi::UserArenaLayout layout(group.shape, abi::bound_regions(message.bindings));
  Result<std::unique_ptr<Arena>> user = device_->map_arena(packet.fds[0].get(), layout.total_bytes);
  if (!user.ok()) return user.status();
  Result<std::unique_ptr<Arena>> exchange =
      device_->map_arena(packet.fds[1].get(), group.exchange_layout.total_bytes);
  if (!exchange.ok()) return exchange.status();
  GroupRankMemory& rank = group.ranks[message.rank];
  rank.user = std::move(user).value();
  rank.exchange = std::move(exchange).value();
  rank.client.clear();
  rank.device_index = message.device_index;
  return {};
}

// What its client has sent may be anything; only the bindings have been checked.
Status Engine::map_client_memory(Group& group, const abi::GroupRank& message, const Packet& packet) {
  const std::size_t memories = packet.fds.size() - abi::kRankFds;
  if (const std::string wrong = abi::check_bindings(group.shape, message.bindings, memories); !wrong.empty())
    return internal_error(wrong);
  for (std::uint32_t index = 1; index <= memories; ++index) {
    Result<std::unique_ptr<Arena>> memory = device_->map_client_memory(
        packet.fds[abi::kRankFds + index - 1].get(), abi::memory_bytes(group.shape, message.bindings, index),
        message.here != 0);
    if (!memory.ok()) {
      return {memory.status().code(), "the memory that " + abi::bound_names(message.bindings, index) +
                                          " is bound to " + memory.status().message()};
    }
    group.ranks[message.rank].client.push_back(std::move(memory).value());
  }
  return {};
}

// To this engine the rank is masked. No operation can be completed so while others count on it, and the
// supervisor refuses the group or breaks it.
void Engine::refuse_rank(Group& group, std::uint32_t rank, const Status& status) {
  log_event(LogLevel::kWarning, "rank refused",
            {{"group", group.id}, {"rank", rank}, {"reason", status.message()}});
  group.set_active(rank, 0);
  group.refused.insert(rank);
  abi::RankRefused message{group.id, rank, status.code(), {}};
  abi::set_text(message.text, status.message().data(), status.message().size());
  send(LinkType::kRankRefused, message);
}

Status Engine::add_member(Packet& packet) {
  const Result<abi::GroupMember> body = packet.read<abi::GroupMember>();
  if (!body.ok()) return body.status();
  const abi::GroupMember& message = body.value();
  Group* group = find_group(message.group_id);
  if (group != nullptr && group->refused.count(message.rank) == 1) return {};
  const auto session = sessions_.find(message.session_id);
  if (group == nullptr || session == sessions_.end() || packet.fds.size() != 1 ||
      message.rank >= group->shape.num_ranks || !group->active(message.rank)) {
    return invalid_argument("kGroupMember for group " + std::to_string(message.group_id) + " session " +
                            std::to_string(message.session_id));
  }
  // One that came while this engine was being told of the group is told of again.
  if (Member* known = find_member(*group, message.rank); known != nullptr) {
    known->first_index = message.first_index;
    return {};
  }
  Result<Mapping> board =
      Mapping::map(packet.fds[0].get(), abi::BoardLayout(group->shape).total_bytes, Access::kReadWrite);
  if (!board.ok()) return board.status();
  auto member = std::make_unique<Member>(*group, message.rank, message.member, session->second.get(),
                                         std::move(board).value());
  member->first_index = message.first_index;
  member->by_stream = message.commands != 0;
  if (Status status = open_lane(*group, *member); !status.ok()) return status;
  // Under a break it goes on where its former engine stood; kResume says where all go on.
  if (group->starts_broken) member->next_number = member->board().next_index.load(std::memory_order_relaxed);
  member->statistics = Statistics::of_member(page_, message.session_id, group->id, message.rank);
  session->second->members[message.member] = member.get();
  group->members.push_back(std::move(member));
  return {};
}

// A rank on a device that runs whole operations.
Status Engine::open_lane(Group& group, Member& member) {
  Launcher* launcher = device_->launcher();
  if (launcher == nullptr) {
    if (member.by_stream) {
      group.unusable = {StatusCode::kUnsupported, "commands is 1 (by stream) on " + device_->name() +
                                                      "; allowed: on CUDA devices, with devices.mode = "
                                                      "\"resident\""};
    }
    return {};
  }
  LaneShape shape = lane_shape(group.shape, group.priority);
  shape.commands = member.by_stream;
  Result<std::unique_ptr<Lane>> lane = launcher->open_lane(shape);
  if (!lane.ok()) {
    group.unusable = lane.status();
    return {};
  }
  member.lane = std::move(lane).value();
  member.heads = std::make_unique<RouteHeads>(group.shape, *launcher);
  if (member.board().memory_cleared.load(std::memory_order_relaxed) == 0) clear_memory(group, member);
  if (member.by_stream) member.commands = std::make_unique<Commands>(member, *launcher);
  return {};
}

// What is in the memory of a new rank is anything.
void Engine::clear_memory(const Group& group, const Member& member) const {
  Launcher* launcher = device_->launcher();
  const GroupRankMemory& memory = group.ranks[member.rank];
  // What peers write to one that rejoins is theirs to clear, see clear_signals.
  const bool rejoins = group.active_since[member.rank] > group.epoch;
  const std::uint64_t first = rejoins ? group.exchange_layout.routing : 0;
  launcher->clear(memory.exchange->bytes() + first, group.exchange_layout.total_bytes - first);
  launcher->clear(memory.user->bytes(), memory.user_bytes());
  member.board().memory_cleared.store(1, std::memory_order_relaxed);
}

// A rank that begins with this epoch, in a group that runs: its signals are cleared by who will write them,
// before he does. Its client is told that it has joined when every engine has resumed, so it looks at none
// before that.
void Engine::clear_signals(const Group& group) const {
  Launcher* launcher = device_->launcher();
  if (launcher == nullptr) return;
  const abi::ExchangeArenaLayout& layout = group.exchange_layout;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    if (group.active_since[rank] != group.epoch) continue;
    for (const auto& member : group.members) {
      for (std::uint32_t block = 0; block < group.shape.depth; ++block) {
        std::byte* base = group.ranks[rank].exchange->bytes() + layout.block_bytes * block;
        launcher->clear(base + layout.ready + member->rank * sizeof(abi::SignalLine),
                        sizeof(abi::SignalLine));
        launcher->clear(base + layout.arrived + member->rank * sizeof(abi::SignalLine),
                        sizeof(abi::SignalLine));
      }
    }
  }
}

Status Engine::commit_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr) return invalid_argument("kGroupCommit for group " + std::to_string(message.group_id));
  abi::GroupReady ready{message.group_id, StatusCode::kOk, {}};
  if (!group->unusable.ok()) {
    ready.status = group->unusable.code();
    abi::set_text(ready.text, group->unusable.message().data(), group->unusable.message().size());
  } else if (const std::string missing = group->check_complete(); !missing.empty()) {
    ready.status = StatusCode::kInternal;
    abi::set_text(ready.text, missing.data(), missing.size());
  } else if (group->starts_broken) {
    group->phase = GroupPhase::kBreaking;
    group->break_acked = true;  // kGroupReady is the acknowledgement
    group->cause.cause = StatusCode::kEngineRestarted;
    group->cause.culprit_rank =
        group->members.empty() ? -1 : static_cast<std::int32_t>(group->members.front()->rank);
    const std::string text = "the engine of " + device_->name() + " was restarted";
    abi::set_text(group->cause.text, text.data(), text.size());
  } else {
    for (const auto& member : group->members) {
      if (member->commands != nullptr) member->commands->resume(true);
    }
    owe_start(*group);
    return {};
  }
  send(LinkType::kGroupReady, ready);
  return {};
}

Status Engine::stop_member(const abi::MemberRef& message) {
  Group* group = find_group(message.group_id);
  Member* member = group == nullptr ? nullptr : find_member(*group, message.rank);
  const bool refused = group != nullptr && group->refused.count(message.rank) == 1;
  if (member == nullptr && !refused)
    return invalid_argument("kStopMember for group " + std::to_string(message.group_id));
  if (member != nullptr) {
    member->stopped = true;
    if (member->commands != nullptr) member->commands->halt();
  }
  stops_.push_back(message);
  answer_stops();
  return {};
}

// Of a group that this engine was never told of.
Status Engine::close_commands(Packet& packet) {
  const Result<abi::CloseCommands> body = packet.read<abi::CloseCommands>();
  if (!body.ok()) return body.status();
  Launcher* launcher = device_->launcher();
  if (packet.fds.size() != 1 || launcher == nullptr) return invalid_argument("kCloseCommands");
  Result<std::unique_ptr<Arena>> user = device_->map_arena(packet.fds[0].get(), body.value().user_bytes);
  if (!user.ok()) return user.status();
  launcher->close_commands((*user)->bytes() + body.value().words);
  return {};
}

Status Engine::break_group(const abi::Break& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr) return invalid_argument("kBreak for group " + std::to_string(message.group_id));
  if (group->starts_owed) start_group(*group);  // of which nobody has rung anything yet
  if (message.fatal == 0) finish_arrived(*group);
  group->cause = message;
  group->broken_ns = now_ns_;
  group->break_acked = false;
  group->phase = message.fatal != 0 ? GroupPhase::kLost : GroupPhase::kBreaking;
  for (const auto& operation : operations_) {
    if (&operation->member().group == group &&
        operation->index() >= (message.fatal != 0 ? message.fail_from : 0)) {
      operation->abandon();
    }
  }
  for (const auto& member : group->members) {
    if (message.fatal == 0 && member->commands != nullptr) member->commands->halt();
  }
  const auto state = message.fatal != 0 ? abi::GroupState::kLost : abi::GroupState::kBroken;
  for (const auto& member : group->members) member->publish_state(state, message);
  if (message.fatal != 0) {
    fail_operations(*group, message.fail_from, message);
    for (const auto& member : group->members) answer_orphans(*member, message.cause);
  }
  return {};
}

Status Engine::resume_group(const abi::Resume& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr) return invalid_argument("kResume for group " + std::to_string(message.group_id));
  group->epoch = message.epoch;
  group->resume_index = message.resume_index;
  clear_signals(*group);
  group->break_requested = false;
  group->released = false;
  if (message.cause != StatusCode::kOk) {
    group->cause.cause = message.cause;
    group->cause.culprit_rank = message.culprit_rank;
    std::memcpy(group->cause.text, message.text, sizeof(message.text));
  }
  for (const auto& member : group->members) {
    member->next_number = message.resume_index;
    if (member->commands != nullptr) member->commands->resume(false);
  }
  owe_start(*group);
  return {};
}

// Commands go on already.
void Engine::start_group(Group& group) {
  const bool is_new = group.phase == GroupPhase::kStarting;
  group.starts_owed = false;
  group.phase = GroupPhase::kActive;
  // The board first: whoever sees a failed operation must find the new epoch there.
  for (const auto& member : group.members) member->publish_state(abi::GroupState::kActive, group.cause);
  if (is_new) {
    send(LinkType::kGroupReady, abi::GroupReady{group.id, StatusCode::kOk, {}});
    return;
  }
  fail_operations(group, 0, group.cause);
  for (const auto& member : group.members) {
    member->failed_from = kNoFailure;
    member->publish_next_index();
    answer_orphans(*member, StatusCode::kEngineRestarted);
  }
  send(LinkType::kResumed, abi::Resumed{group.id, group.epoch});
}

// Some other engine is silent. It may still write into buffers of the operations that fail here, but no
// later operation can begin before it has spoken.
Status Engine::release_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr || group->phase != GroupPhase::kBreaking || !group->break_acked)
    return invalid_argument("kRelease for group " + std::to_string(message.group_id));
  group->released = true;
  fail_operations(*group, 0, group->cause);
  return {};
}

// A rank that has been lost; its operations have been abandoned.
void Engine::drop_member(Group& group, std::uint32_t rank) {
  Member* member = find_member(group, rank);
  if (member == nullptr) return;
  for (auto it = operations_.begin(); it != operations_.end();) {
    if (&(*it)->member() == member) {
      finish(**it, group.cause.cause, group.cause);
      it = operations_.erase(it);
    } else {
      ++it;
    }
  }
  answer_orphans(*member, StatusCode::kEngineRestarted);
  if (member->session != nullptr) member->session->end_member(member->number);
  std::erase_if(group.members, [member](const auto& entry) { return entry.get() == member; });
}

Status Engine::remove_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group != nullptr) {
    const abi::Break gone{group->id, group->epoch, 0, 1, StatusCode::kAborted, -1, "the group was removed"};
    for (const auto& operation : operations_) {
      if (&operation->member().group == group) operation->abandon();
    }
    for (const auto& member : group->members) {
      if (member->commands != nullptr) member->commands->halt();
    }
    settle(*group);
    fail_operations(*group, 0, gone);
    for (const auto& member : group->members) {
      answer_orphans(*member, StatusCode::kAborted);
      if (member->session != nullptr) member->session->end_member(member->number);
    }
    groups_.erase(message.group_id);
  }
  send(LinkType::kGroupRemoved, message);
  return {};
}

Status Engine::apply_settings(const abi::Settings& message) {
  settings_ = message;
  device_->set_num_sms(message.sms);
  log_set_level(static_cast<LogLevel>(message.log_level));
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
  return {};
}

}  // namespace epd
