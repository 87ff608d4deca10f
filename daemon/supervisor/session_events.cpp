#include "session_events.h"

#include "device_list.h"
#include "fleet.h"
#include "live_config.h"
#include "losses.h"
#include "membership/deciders.h"
#include "membership/group.h"

#include <unistd.h>
#include <memory>
#include <optional>
#include <utility>

namespace epd::supervisor {
namespace {

using session::Session;

Caller caller_of(const PeerIdentity& peer) {
  return {peer.uid, peer.gids};
}

membership::SessionId local(std::uint64_t session_id) {
  return {membership::kLocalNode, session_id};
}

}  // namespace

SessionEvents::SessionEvents(const Rooms& rooms, const Parts& parts) : rooms_(rooms), parts_(parts) {}

Status SessionEvents::may_attach(const PeerIdentity& peer) {
  Status status = parts_.lifecycle.admitting();
  return status.ok() ? rooms_.config->access.may_attach(caller_of(peer)) : status;
}

Quota SessionEvents::max_sessions_of(const PeerIdentity& peer) {
  return rooms_.config->max_sessions_of(caller_of(peer));
}

Status SessionEvents::may_use_device(const PeerIdentity& peer, std::uint32_t device) {
  if (Status status = rooms_.config->access.may_use_device(caller_of(peer), rooms_.fleet[device].name());
      !status.ok())
    return status;
  if (rooms_.fleet[device].state() != DeviceState::kFailed) return {};
  return internal_error(rooms_.fleet[device].name() +
                        " has failed: its engine died too often; see the daemon's log. An operator "
                        "starts it again with: epctl restart device " +
                        rooms_.fleet[device].name());
}

std::uint64_t SessionEvents::ending_sessions(std::uint32_t uid) const {
  return parts_.removals.of_user(uid);
}

int SessionEvents::engine_bell(std::uint32_t device) const {
  return rooms_.fleet[device].memory().bell_fd();
}

void SessionEvents::session_opened(const Session& session) {
  parts_.orders.add_session(session);
}

void SessionEvents::session_closed(Session session, const std::string& how) {
  parts_.gpu_work.session_closed(session.id);
  if (!how.starts_with(session::kEnded)) rooms_.memory.give_up(session.id);
  record_losses(rooms_.deciders, session.id, std::nullopt, how);
  // The other ranks read this text. A process that has died can't be looked up any more.
  const bool named = how == session::kDied && !session.peer.program.empty();
  rooms_.deciders.handle(membership::SessionClosed{
      local(session.id), named ? how + " (program " + session.peer.program + ")" : how});
  parts_.orders.carry_out_all();
  if (!rooms_.fleet[session.device].is_ready()) return;
  parts_.orders.send(session.device, abi::LinkType::kRemoveSession, abi::SessionRef{session.id});
  parts_.removals.add(std::move(session));
}

void SessionEvents::join_requested(const Session& session, std::uint32_t request_id, const abi::Join& join) {
  const Caller caller = caller_of(session.peer);
  Status status = parts_.lifecycle.admitting();
  if (status.ok()) {
    const std::string group = session::printable(join.group, abi::text_length(join.group));
    status = rooms_.config->access.may_join(caller, group);
    // A priority above every limit is allowed to nobody. The registry refuses it.
    if (status.ok() && join.priority <= abi::kMaxPriority)
      status = rooms_.config->access.may_take_priority(caller, join.priority);
  }
  // A join that the coordinator would refuse is not sent: such a frame would be malformed.
  if (status.ok() && join.shape.span == abi::Span::kCluster) status = membership::check_join(join);
  if (!status.ok()) {
    parts_.orders.refuse(session.id, request_id, status);
    return;
  }
  rooms_.deciders.handle(membership::JoinRequest{{local(session.id), request_id},
                                                 session.peer.uid,
                                                 session.peer.pid,
                                                 {membership::kLocalNode, session.device},
                                                 rooms_.devices[session.device].name.kind,
                                                 join,
                                                 rooms_.config->max_groups_of(caller)});
  parts_.orders.carry_out_all();  // what waits in links by then counts for the next join
}

// The closer closes the memory when nobody uses it any more.
Status SessionEvents::keep_memory(std::uint32_t uid, std::vector<UniqueFd> memory, ClientMemory& out) {
  struct Kept {
    Kept(std::vector<UniqueFd> fds, std::uint32_t user, Closer& slowly)
        : memory(std::move(fds)), uid(user), closer(slowly) {}
    ~Kept() {
      for (UniqueFd& fd : memory) closer.close(std::move(fd), uid);
    }
    DescriptorShare share;
    std::vector<UniqueFd> memory;
    std::uint32_t uid;
    Closer& closer;
  };
  const auto kept = std::make_shared<Kept>(std::move(memory), uid, parts_.closer);
  Result<DescriptorShare> share = parts_.descriptors.take(uid, kept->memory.size());
  if (!share.ok()) return share.status();
  kept->share = std::move(*share);
  out = ClientMemory(kept, &kept->memory);
  return {};
}

// An engine may open memory that a process of another user has exported, and a handle does not say reliably
// which process exported it. Under MPS all processes on the GPU are one user's.
Status SessionEvents::check_map(const Session& session, const abi::MapMemory& message,
                                const std::vector<UniqueFd>& memory) const {
  const DeviceList::Device& device = rooms_.devices[session.device];
  if (device.name.kind != abi::DeviceKind::kCuda)
    return {StatusCode::kUnsupported, "operations on " + device.name.text() +
                                          " take rows from their slots alone; allowed: memory of GPUs"};
  if (std::string wrong = abi::check_memory_range(message.range, memory.size()); !wrong.empty())
    return invalid_argument(std::move(wrong));
  if (message.range.by == abi::MemoryBy::kIpcHandle && !device.facts.mps && session.peer.uid != ::geteuid())
    return {StatusCode::kPermissionDenied, "memory of cudaMalloc is of user " +
                                               std::to_string(session.peer.uid) +
                                               "; allowed without MPS: memory of the daemon's user (" +
                                               std::to_string(::geteuid()) + "), or of cuMemCreate"};
  for (const UniqueFd& piece : memory) {
    Status status = device::check_client_memory(piece.get());
    if (!status.ok()) return {status.code(), "memory to be mapped " + status.message()};
  }
  return {};
}

void SessionEvents::map_requested(const Session& session, std::uint32_t request_id,
                                  const abi::MapMemory& message, std::vector<UniqueFd> memory) {
  Status status = check_map(session, message, memory);
  ClientMemory kept;
  if (status.ok() && !memory.empty()) status = keep_memory(session.peer.uid, std::move(memory), kept);
  if (status.ok()) return parts_.maps.requested(session, request_id, message, std::move(kept));
  for (UniqueFd& fd : memory) parts_.closer.close(std::move(fd), session.peer.uid);
  parts_.orders.refuse(session.id, request_id, status);
}

void SessionEvents::leave_requested(const Session& session, std::uint32_t request_id,
                                    const abi::Leave& leave) {
  rooms_.deciders.each([&](const membership::Group& group) {
    for (const auto& [rank, member] : group.members) {
      if (member.session == local(session.id) && member.member == leave.member)
        rooms_.memory.give_up(group.id, rank);
    }
  });
  record_losses(rooms_.deciders, session.id, leave.member, "left");
  rooms_.deciders.handle(membership::LeaveRequest{{local(session.id), request_id}, leave.member});
}

}  // namespace epd::supervisor
