#include "session/session_table.h"

#include "base/event.h"
#include "porter.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>
#include <cstring>

namespace epd::session {
namespace {

constexpr std::uint64_t kGateKey = 0;  // in the epoll set; other keys are ids of connections

constexpr int kEventsPerCall = 64;

// The connections that check_arrival counts, and as many that are being refused.
Gate::Limits gate_limits(const SessionLimits& limits) {
  const std::size_t sessions = limits.max_sessions;
  return {sessions + 2 * (SessionTable::kMaxHalfOpenPerUser + SessionTable::kMaxEndingPerUser),
          sessions + 2 * (SessionTable::kMaxHalfOpen + SessionTable::kMaxEnding),
          " (more with a larger limits.max_sessions)"};
}

std::vector<std::byte> refusal_packet(const Status& status) {
  const abi::Refused body = refusal(status);
  const abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(abi::AttachType::kRefused), 0,
                               sizeof(header) + sizeof(body), 0};
  std::vector<std::byte> packet(header.bytes);
  std::memcpy(packet.data(), &header, sizeof(header));
  std::memcpy(packet.data() + sizeof(header), &body, sizeof(body));
  return packet;
}

}  // namespace

abi::Refused refusal(const Status& status) {
  abi::Refused refused{status.code(), {}};
  abi::set_text(refused.text, status.message().data(), status.message().size());
  return refused;
}

Status SessionTable::listen(Listener listener) {
  listener_ = std::move(listener);
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return errno_status("epoll_create1");
  Result<std::unique_ptr<Gate>> gate = Gate::open(
      listener_.take_socket(), [](std::uint64_t, const PeerIdentity&) -> Porter { return carry_packets; },
      gate_limits(options_.limits), refusal_packet);
  if (!gate.ok()) return gate.status();
  gate_ = std::move(*gate);
  return watch(gate_->poll_fd(), kGateKey);
}

Status SessionTable::watch(int fd, std::uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return errno_status("epoll_ctl");
  return {};
}

void SessionTable::set_limits(const SessionLimits& limits) {
  options_.limits = limits;
  if (gate_ != nullptr) gate_->set_limits(gate_limits(limits));
}

std::uint64_t SessionTable::total_refused() const {
  return total_refused_ + (gate_ == nullptr ? 0 : gate_->dismissed());
}

void SessionTable::process() {
  epoll_event events[kEventsPerCall];
  const int n = ::epoll_wait(epoll_.get(), events, kEventsPerCall, 0);
  std::map<std::uint32_t, int> ready;  // connections of each user
  std::array<std::uint32_t, kEventsPerCall> users{};
  for (int i = 0; i < n; ++i) {
    const auto found = connections_.find(events[i].data.u64);
    if (found != connections_.end()) ++ready[users[i] = found->second.peer.uid];
  }
  for (int i = 0; i < n; ++i) {
    const std::uint64_t key = events[i].data.u64;
    if (key == kGateKey) {
      admit_all();
    } else {
      receive(key, std::clamp(kPacketsPerUser / std::max(ready[users[i]], 1), 1, kPacketsPerSession));
    }
  }
}

void SessionTable::receive(std::uint64_t id, int max_packets) {
  for (int i = 0; i < max_packets; ++i) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Session& session = found->second;
    const std::uint32_t uid = session.peer.uid;
    Packet packet;
    Carried carried;
    Status error;
    const ReceiveResult result =
        receive_prefixed(session.socket.get(), packet, error, {&carried, sizeof(carried)});
    if (result == ReceiveResult::kNothing) return;
    if (result == ReceiveResult::kClosed) return close(id, kDied);
    if (carried.truncated != 0) {
      error = too_large();
    } else if (result == ReceiveResult::kPacket) {
      error = check_descriptors(session, packet, carried);
    }
    if (!error.ok()) {
      const bool has_id = result == ReceiveResult::kPacket;
      malformed(session, has_id ? packet.header.request_id : 0, error);
    } else {
      handle(session, packet, carried);
    }
    for (UniqueFd& fd : packet.fds) closer_.close(std::move(fd), uid);
  }
}

// Only what names memory of the client's own brings descriptors.
Status SessionTable::check_descriptors(const Session& session, const Packet& packet,
                                       const Carried& carried) const {
  const std::size_t said = packet.header.num_fds;
  if (said != carried.num_fds) {
    return invalid_argument("packet says " + std::to_string(said) + " descriptors; received " +
                            std::to_string(carried.num_fds));
  }
  const auto type = static_cast<abi::AttachType>(packet.header.type);
  const std::size_t allowed = session.attached && type == abi::AttachType::kMapMemory ? abi::kMaxPieces : 0;
  if (carried.too_many != 0) {
    return invalid_argument(
        "descriptors that are no memory came with many messages of this connection; allowed: what "
        "cuMemExportToShareableHandle gives");
  }
  if (said > allowed) {
    return invalid_argument("message carries " + std::to_string(said) +
                            " descriptors; allowed: " + std::to_string(allowed));
  }
  if (const std::size_t waiting = closer_.waiting(session.peer.uid); said != 0 && waiting > kMaxUnclosed) {
    return resource_exhausted(
        "user " + std::to_string(session.peer.uid) + " has " + std::to_string(waiting) +
        " descriptors that are still being closed; allowed: " + std::to_string(kMaxUnclosed));
  }
  if (packet.fds.size() == said || carried.not_memory >= 0) return {};
  return resource_exhausted("the daemon can't take " + std::to_string(said) +
                            " more descriptors (RLIMIT_NOFILE)");
}

void SessionTable::handle(Session& session, Packet& packet, const Carried& carried) {
  const std::uint32_t request_id = packet.header.request_id;
  const auto type = static_cast<abi::AttachType>(packet.header.type);
  if (!session.attached) {
    if (type == abi::AttachType::kHello) {
      hello(session, packet);
    } else {
      malformed(session, request_id,
                invalid_argument("first message has type " + std::to_string(packet.header.type) +
                                 "; allowed: 1 (Hello)"));
    }
    return;
  }
  if (type == abi::AttachType::kDetach && packet.body_bytes == 0) {
    close(session.id, "detached");
    return;
  }
  if (type == abi::AttachType::kJoin) {
    Result<abi::Join> join = packet.read<abi::Join>();
    if (!join.ok()) return malformed(session, request_id, join.status());
    if (!expect_reply(session, type, request_id)) return;
    host_.join_requested(session, request_id, *join);
  } else if (type == abi::AttachType::kLeave) {
    Result<abi::Leave> leave = packet.read<abi::Leave>();
    if (!leave.ok()) return malformed(session, request_id, leave.status());
    if (!expect_reply(session, type, request_id)) return;
    host_.leave_requested(session, request_id, *leave);
  } else if (type == abi::AttachType::kMapMemory) {
    Result<abi::MapMemory> map = packet.read<abi::MapMemory>();
    if (!map.ok()) return malformed(session, request_id, map.status());
    if (!expect_reply(session, type, request_id)) return;
    if (carried.not_memory >= 0) {
      return refuse(session.id, request_id,
                    invalid_argument("memory to be mapped: the descriptor is not of memory; allowed: what "
                                     "cuMemExportToShareableHandle gives"));
    }
    host_.map_requested(session, request_id, *map, std::move(packet.fds));
  } else if (type == abi::AttachType::kRowsTold) {
    Result<abi::RowsTold> told = packet.read<abi::RowsTold>();
    if (!told.ok()) return malformed(session, request_id, told.status());
    host_.rows_told(session, *told);
  } else {
    malformed(
        session, request_id,
        invalid_argument(
            "message type is " + std::to_string(packet.header.type) +
            "; allowed: 4 (Join), 6 (Leave), 9 (Detach, without a body), 10 (MapMemory), 12 (RowsTold)"));
  }
}

// False: the request has been answered already.
bool SessionTable::expect_reply(Session& session, abi::AttachType type, std::uint32_t request_id) {
  const Status status = check_pending(session, type);
  if (!note_pending(session, request_id)) {
    malformed(session, request_id,
              invalid_argument("request id is " + std::to_string(request_id) +
                               "; allowed: those of no request that still waits for its reply"));
    return false;
  }
  if (status.ok()) return true;
  refuse(session.id, request_id, status);
  return false;
}

// The reason if its session, or its user, has too many already.
Status SessionTable::check_pending(const Session& session, abi::AttachType type) const {
  const bool join = type != abi::AttachType::kLeave;
  const std::size_t of_session = session.pending_requests.size();
  if (join && of_session >= abi::kMaxPendingRequests) {
    return resource_exhausted("session " + std::to_string(session.id) + " has " + std::to_string(of_session) +
                              " requests without a reply; allowed before another one: fewer than " +
                              std::to_string(abi::kMaxPendingRequests));
  }
  const std::uint32_t uid = session.peer.uid;
  const auto found = pending_.find(uid);
  if (found == pending_.end() || found->second < abi::kMaxPendingRequests) return {};
  const std::uint64_t sessions =
      std::min<std::uint64_t>(host_.max_sessions_of(session.peer).limit, options_.limits.max_sessions);
  const std::uint64_t each = kPendingPerSession * (join ? 1 : 2);
  const Quota quota{std::max<std::uint64_t>(abi::kMaxPendingRequests, each * sessions),
                    std::to_string(each) + " for each session that it may have"};
  return found->second < quota.limit ? Status()
                                     : over_quota(uid, found->second, "requests without a reply", quota);
}

// False: its id is of one that waits already.
bool SessionTable::note_pending(Session& session, std::uint32_t request_id) {
  if (!session.pending_requests.insert(request_id).second) return false;
  ++pending_[session.peer.uid];
  return true;
}

void SessionTable::forget_pending(std::uint32_t uid, std::size_t count) {
  const auto found = pending_.find(uid);
  if (found != pending_.end() && (found->second -= count) == 0) pending_.erase(found);
}

void SessionTable::malformed(Session& session, std::uint32_t request_id, const Status& error) {
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "malformed message",
                 {{"session", session.id},
                  {"uid", session.peer.uid},
                  {"pid", session.peer.pid},
                  {"reason", error.message()}},
                 session.peer.uid);
  ++total_refused_;
  note_pending(session, request_id);
  refuse(session.id, request_id, error);
  if (end_segments(session.segments, error)) ring(session);
  close(session.id, "broke the attach protocol");
}

void SessionTable::send_reply(std::uint64_t session_id, std::uint32_t request_id, std::uint16_t type,
                              const void* body, std::size_t bytes, const FdList& fds) {
  const auto found = connections_.find(session_id);
  if (found == connections_.end() || found->second.pending_requests.erase(request_id) == 0) return;
  forget_pending(found->second.peer.uid, 1);
  Status status = send_packet(found->second.socket.get(), type, request_id, body, bytes, fds);
  if (status.ok()) return;
  // The client does not read, or is dead. After the shutdown its end arrives as usual, outside this call.
  log_event(LogLevel::kWarning, "reply not sent", {{"session", session_id}, {"reason", status.message()}});
  ::shutdown(found->second.socket.get(), SHUT_RDWR);
}

void SessionTable::refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status) {
  reply(session_id, request_id, abi::AttachType::kRefused, refusal(status));
}

void SessionTable::end(std::uint64_t session_id, const Status& status) {
  const auto found = connections_.find(session_id);
  if (found == connections_.end()) return;
  Session& session = found->second;
  if (end_segments(session.segments, status)) ring(session);
  abi::Goodbye goodbye{status.code(), {}};
  abi::set_text(goodbye.text, status.message().data(), status.message().size());
  (void)send_message(session.socket.get(), abi::AttachType::kGoodbye, goodbye);
  close(session_id, kEnded + status.message());
}

void SessionTable::end_all(const Status& status) {
  while (!connections_.empty()) end(connections_.begin()->first, status);
}

void SessionTable::close(std::uint64_t id, const std::string& how) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  // Removed from the table first, because the host may look at the table.
  Session session = std::move(connections_.extract(found).mapped());
  forget_pending(session.peer.uid, session.pending_requests.size());
  hang_up(std::move(session.socket), session.peer.uid);
  if (!session.attached) return;
  --attached_;
  // A client that ends as it should detaches first.
  const LogLevel level = how == kDied ? LogLevel::kWarning : LogLevel::kInfo;
  record_of_user(session.peer.uid, EventKind::kSessionEnded, level, "session closed",
                 {{"session", id},
                  {"uid", session.peer.uid},
                  {"pid", session.peer.pid},
                  {"program", session.peer.program},
                  {"cgroup", session.peer.cgroup},
                  {"how", how}});
  host_.session_closed(std::move(session), how);
}

// The porter sends what is left, and ends. Packets that it has brought meanwhile may carry memory.
void SessionTable::hang_up(UniqueFd socket, std::uint32_t uid) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  ::shutdown(socket.get(), SHUT_RDWR);
  closer_.close(std::move(socket), uid);
}

void SessionTable::ring(const Session& session) const {
  (void)order(session.socket.get(),
              PorterOrder::kRing);  // a porter without space for it has earlier rings to pass on
}

void SessionTable::ring(std::uint64_t session_id) {
  const auto found = connections_.find(session_id);
  if (found != connections_.end()) ring(found->second);
}

void SessionTable::stop_listening() {
  gate_.reset();
  listener_.remove();
}

const Session* SessionTable::find(std::uint64_t session_id) const {
  const auto found = connections_.find(session_id);
  return found == connections_.end() || !found->second.attached ? nullptr : &found->second;
}

std::uint32_t SessionTable::attached_on(std::uint32_t device) const {
  return static_cast<std::uint32_t>(std::count_if(
      connections_.begin(), connections_.end(),
      [device](const auto& entry) { return entry.second.attached && entry.second.device == device; }));
}

}  // namespace epd::session
