#include "engine_events.h"

#include "base/event.h"
#include "member_memory_store.h"
#include "membership/deciders.h"
#include "memory_limit.h"
#include "process_state.h"
#include "session/session_table.h"

#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {
namespace {

membership::EngineId local(std::uint32_t device) {
  return {membership::kLocalNode, device};
}

}  // namespace

EngineEvents::EngineEvents(const Rooms& rooms, const Parts& parts) : rooms_(rooms), parts_(parts) {}

void EngineEvents::engine_ready(std::uint32_t device) {
  parts_.orders.send(device, abi::LinkType::kSettings, parts_.settings.of_device(device));
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (session.attached && session.device == device) parts_.orders.add_session(session);
  }
  for (const MemberMemoryStore::OpenStreams& open : rooms_.memory.take_open_streams(device))
    parts_.orders.send(device, abi::LinkType::kCloseStreams, open.message, {open.user.get()});
  rooms_.deciders.handle(membership::EngineUp{local(device), rooms_.fleet[device].far_address()});
}

void EngineEvents::engine_down(std::uint32_t device, const std::string& text, EngineEnd end) {
  parts_.removals.engine_down(device);
  if (end == EngineEnd::kDeviceFailed) end_dying_sessions(device);
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (session.attached && session.device == device) session::unserve_segments(session.segments);
  }
  // Engines of its groups are told of the break, if there are others.
  rooms_.deciders.each([&](const membership::Group& group) {
    if (!group.is(membership::GroupPhase::kActive) || !group.needs(local(device))) return;
    const membership::BreakReason reason = group.reason_of_end(local(device), text);
    abi::Break message{group.id, group.epoch, 0, 0, reason.cause, reason.failed_rank, {}};
    abi::set_text(message.text, reason.text.data(), reason.text.size());
    parts_.orders.tell_break(group.label(), message, end == EngineEnd::kPlanned);
  });
  rooms_.deciders.handle(membership::EngineDown{local(device), text, rooms_.memory.boards_on(device)});
  if (end == EngineEnd::kOutOfMemory) make_room();
}

// The supervisor holds the memory that an engine has touched, so the next engine would end as this one did. A
// user who holds little has not caused that, and little would be gained from them.
void EngineEvents::make_room() {
  constexpr std::uint64_t kLittle = 64;  // a part of the memory
  const std::optional<ArenaStore::Fullest> fullest = rooms_.memory.fullest();
  const std::uint64_t memory = available_memory_bytes();
  if (!fullest || fullest->bytes < memory / kLittle) return;
  rooms_.memory.hold_to_memory(fullest->uid);
  std::uint64_t left = fullest->bytes;
  for (const auto& [bytes, id] : fullest->sessions) {
    const session::Session* session = rooms_.sessions.find(id);
    if (session != nullptr) {  // else its end is on its way
      const std::string text = "out of memory: arenas of user " + std::to_string(fullest->uid) + " held " +
                               std::to_string(fullest->bytes) + " bytes, the most, those of this session " +
                               std::to_string(bytes) + " of them; the daemon has " + std::to_string(memory) +
                               "; join smaller groups (epctl size)";
      record_event(
          EventKind::kEvicted, LogLevel::kWarning, "session ended for want of memory",
          {{"session", id}, {"uid", session->peer.uid}, {"pid", session->peer.pid}, {"reason", text}});
      rooms_.memory.give_up(id);
      rooms_.sessions.end(id, resource_exhausted(text));
    }
    left -= bytes;
    if (left <= max_bytes_of_filler()) return;
  }
}

void EngineEvents::engine_failed(std::uint32_t device, const std::string& text) {
  rooms_.memory.take_open_streams(device);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (session.attached && session.device == device) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) rooms_.sessions.end(id, internal_error(text));
}

// The process keeps what it has on the GPU, because nothing of epd's depends on that. Its streams are
// unblocked. Its kernels can write only memory that it has mapped itself.
void EngineEvents::session_failed(const abi::SessionFailed& message) {
  const std::string text(message.text, abi::text_length(message.text));
  const session::Session* session = rooms_.sessions.find(message.session_id);
  const EventOwner owner = session == nullptr ? kDaemonOwner : EventOwner{session->peer.uid};
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "session ended for an illegal call",
                 {{"session", message.session_id}, {"reason", text}}, owner);
  rooms_.memory.give_up(message.session_id);
  rooms_.sessions.end(message.session_id, Status(message.status, text));
}

// An engine that sends a body whose size does not fit its type is killed.
template <typename T>
std::optional<T> EngineEvents::read(std::uint32_t device, const Packet& packet) {
  Result<T> message = packet.read<T>();
  if (message.ok()) return *message;
  rooms_.fleet[device].kill(message.status().message());
  return std::nullopt;
}

template <typename Event>
void EngineEvents::tell(std::uint32_t device, const Packet& packet) {
  const auto message = read<decltype(Event::message)>(device, packet);
  if (message) rooms_.deciders.handle(Event{local(device), *message});
}

void EngineEvents::tell_ready(std::uint32_t device, const Packet& packet) {
  const auto message = read<abi::GroupReady>(device, packet);
  if (!message) return;
  rooms_.deciders.handle(
      membership::GroupReady{local(device), *message, rooms_.memory.boards_on(device, message->group_id)});
}

void EngineEvents::tell_peer_lost(std::uint32_t device, const Packet& packet) {
  const auto message = read<abi::PeerLost>(device, packet);
  if (!message) return;
  const std::string text(message->text, abi::text_length(message->text));
  log_event(LogLevel::kWarning, "engine of another node not reached",
            {{"device", rooms_.fleet[device].name()}, {"reason", text}});
  rooms_.deciders.handle(
      membership::PeerLost{local(device), {message->node, message->device_index}, text, message->loss});
}

void EngineEvents::engine_message(std::uint32_t device, const Packet& packet) {
  using abi::LinkType;
  switch (static_cast<LinkType>(packet.header.type)) {
    case LinkType::kSessionFailed:
      if (const auto message = read<abi::SessionFailed>(device, packet)) session_failed(*message);
      return;
    case LinkType::kSessionRemoved:
      if (const auto message = read<abi::SessionRef>(device, packet))
        parts_.removals.removed(device, message->session_id);
      return;
    case LinkType::kMemoryMapped:
      if (const auto message = read<abi::MemoryMapped>(device, packet))
        parts_.maps.answered(device, *message);
      return;
    case LinkType::kGroupReady: return tell_ready(device, packet);
    case LinkType::kGroupWaits: return tell<membership::GroupWaits>(device, packet);
    case LinkType::kMemberStopped: return tell<membership::MemberStopped>(device, packet);
    case LinkType::kBreakRequest: return tell<membership::BreakRequested>(device, packet);
    case LinkType::kBroken: return tell<membership::Broken>(device, packet);
    case LinkType::kResumed: return tell<membership::Resumed>(device, packet);
    case LinkType::kRankRefused: return tell<membership::RankRefused>(device, packet);
    case LinkType::kPeerLost: return tell_peer_lost(device, packet);
    case LinkType::kGroupRemoved: return tell<membership::GroupRemoved>(device, packet);
    default: rooms_.fleet[device].kill("it sent message type " + std::to_string(packet.header.type));
  }
}

// A GPU mostly fails because a client was killed inside its kernel. That client needs half a second to end,
// with everything that it has mapped of the GPU. Only then do its socket and its process show that it has
// ended. The other ranks of its groups need not wait for that.
void EngineEvents::end_dying_sessions(std::uint32_t device) {
  std::vector<std::uint64_t> dying;
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (session.attached && session.device == device && session.peer.pidfd.valid() &&
        is_ending(session.peer.pid))
      dying.push_back(id);
  }
  for (const std::uint64_t id : dying) rooms_.sessions.died(id);
}

void EngineEvents::before_kill(std::uint32_t device, std::function<void()> then) {
  parts_.gpu_work.before_kill(device, std::move(then));
}

void EngineEvents::engine_waits(std::uint32_t device) {
  std::string pids;
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (session.attached && session.device == device)
      pids += (pids.empty() ? "" : ", ") + std::to_string(session.peer.pid);
  }
  log_event(
      LogLevel::kWarning,
      "the GPU's MPS server takes no new process until all that its fault has hit are gone; the engine waits",
      {{"device", rooms_.fleet[device].name()}, {"clients", pids}});
}

}  // namespace epd::supervisor
