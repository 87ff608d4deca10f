// Engine: the supervisor's messages. Both ends of the link are ours; a message that makes no sense
// is reported and, since nothing can be trusted then, ends the engine, which the supervisor restarts.

#include "base/log.h"
#include "commands.h"
#include "engine.h"

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

// What does not fit into the round stays in the socket, so the next one begins with it.
void Engine::handle_link() {
  flush_link();
  Packet packet;
  Status error;
  const std::uint64_t end = clock_.now_ns() + kShareNs;
  while (!stop_ && clock_.now_ns() < end) {
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
    case LinkType::kCloseStreams: status = close_streams(packet); break;
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
    case LinkType::kAllTold:
      status = with_body<abi::AllTold>(packet, [this](const auto&) { return note_all_told(); });
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

// Of one that is being removed the supervisor speaks no more.
Group* Engine::find_group(std::uint64_t id) {
  const auto found = groups_.find(id);
  const bool known = found != groups_.end() && found->second->phase != GroupPhase::kRemoving;
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
    send(LinkType::kSessionFailed, failed);
    return {};
  }
  (*port)->statistics = Statistics::of_session(page_, id);
  if (all_told_) (*port)->set_all_told();
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

// Whatever former engines left behind for another group than those told by now, nobody waits for any more.
Status Engine::note_all_told() {
  all_told_ = true;
  for (const auto& [id, session] : sessions_) session->set_all_told();
  return {};
}

Status Engine::begin_group(const abi::GroupBegin& message) {
  if (groups_.contains(message.group_id))
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

Status Engine::commit_group(const abi::GroupRef& message) {
  Group* group = find_group(message.group_id);
  if (group == nullptr) return invalid_argument("kGroupCommit for group " + std::to_string(message.group_id));
  for (const auto& member : group->members) member->session->members[member->number] = member.get();
  abi::GroupReady ready{message.group_id, StatusCode::kOk, {}};
  if (!group->unusable.ok()) {
    ready.status = group->unusable.code();
    abi::set_text(ready.text, group->unusable.message().data(), group->unusable.message().size());
  } else if (const std::string missing = group->check_complete(); !missing.empty()) {
    ready.status = StatusCode::kInternal;
    abi::set_text(ready.text, missing.data(), missing.size());
  } else if (group->starts_broken) {
    group->phase = GroupPhase::kBreaking;
    group->break_acked = true;  // kGroupReady is the acknowledgement, and boards say how far ranks have come
    for (const auto& member : group->members) catch_up(*member);
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
