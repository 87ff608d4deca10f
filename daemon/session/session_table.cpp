#include "session/session_table.h"

#include "base/event.h"
#include "proto/binding_rules.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>
#include <limits>

namespace epd {
namespace {

// Keys of the epoll set: 0 is the listener; a connection has two, one for its socket, one for its process.
constexpr std::uint64_t kListenerKey = 0;
constexpr std::uint64_t socket_key(std::uint64_t id) {
  return id * 2;
}
constexpr std::uint64_t process_key(std::uint64_t id) {
  return id * 2 + 1;
}

constexpr int kEventsPerCall = 64;
constexpr int kAcceptsPerTurn = 64;
constexpr std::size_t kMostUnclosed = 4 * Airlock::kSlots;  // while no child can be started
constexpr std::uint64_t kConnectionDescriptors = 2;         // its socket, its process
constexpr int kPacketsPerTurn = 16;  // of one connection, before the others have theirs

}  // namespace

Result<std::unique_ptr<SessionTable>> SessionTable::create(Options options, Listener listener,
                                                           const Clock& clock, SessionHost& host,
                                                           PeerResources resources) {
  std::unique_ptr<SessionTable> table(
      new SessionTable(std::move(options), std::move(listener), clock, host, resources));
  table->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!table->epoll_.valid()) return errno_status("epoll_create1");
  if (Status status = table->watch(table->listener_.fd(), kListenerKey); !status.ok()) return status;
  return table;
}

Status SessionTable::watch(int fd, std::uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return errno_status("epoll_ctl");
  return {};
}

void SessionTable::process() {
  epoll_event events[kEventsPerCall];
  const int n = ::epoll_wait(epoll_.get(), events, kEventsPerCall, 0);
  for (int i = 0; i < n; ++i) {
    const std::uint64_t key = events[i].data.u64;
    if (key == kListenerKey) {
      accept_all();
    } else if (key % 2 == 1) {
      close(key / 2, "died");
    } else {
      receive(key / 2);
    }
  }
}

void SessionTable::accept_all() {
  for (int i = 0; i < kAcceptsPerTurn && listener_.fd() >= 0; ++i) {
    if (airlock_.held_up() && airlock_.waiting() > kMostUnclosed)
      return pause_listening("no thread can be started that closes sockets");
    UniqueFd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      accept_one(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      pause_listening(errno_status("accept").message());
    return;
  }
}

// The connection can't be taken off the queue, and would wake us for ever.
void SessionTable::pause_listening(const std::string& reason) {
  static LogLimiter limiter;
  limiter.log(LogLevel::kError, "cannot accept connections, trying again in a second", {{"reason", reason}});
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
  listen_again_ns_ = clock_.now_ns() + 1'000'000'000;
}

void SessionTable::accept_one(UniqueFd socket) {
  Result<PeerIdentity> peer = peer_identity(socket.get());
  if (!peer.ok()) return airlock_.close_socket(std::move(socket));
  std::uint32_t half_open = 0;
  std::uint32_t of_user = 0;
  for (const auto& [id, other] : connections_) {
    half_open += other.attached ? 0 : 1;
    of_user += !other.attached && other.peer.uid == peer->uid ? 1 : 0;
  }
  if (of_user >= kMaxHalfOpenPerUser || half_open >= kMaxHalfOpen) {
    ++total_refused_;
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection refused: too many without Hello",
                   {{"uid", peer->uid}, {"pid", peer->pid}, {"of_user", of_user}, {"half_open", half_open}},
                   peer->uid);
    const bool all = of_user < kMaxHalfOpenPerUser;
    return turn_away(std::move(socket),
                     resource_exhausted(
                         (all ? "all users have " : "user " + std::to_string(peer->uid) + " has ") +
                         std::to_string(all ? half_open : of_user) + " connections without Hello; allowed: " +
                         std::to_string(all ? kMaxHalfOpen : kMaxHalfOpenPerUser)));
  }
  Result<DescriptorShare> share = descriptors_.take(peer->uid, kConnectionDescriptors);
  if (!share.ok()) {
    ++total_refused_;
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection refused",
                   {{"uid", peer->uid}, {"pid", peer->pid}, {"reason", share.status().message()}}, peer->uid);
    return turn_away(std::move(socket), share.status());
  }
  const std::uint64_t id = next_id_++;
  Session& session = connections_[id];
  session.id = id;
  session.socket = std::move(socket);
  session.peer = std::move(*peer);
  session.descriptors = std::move(*share);
  session.accepted_ns = clock_.now_ns();
  Status status = watch(session.socket.get(), socket_key(id));
  if (status.ok() && session.peer.pidfd.valid()) status = watch(session.peer.pidfd.get(), process_key(id));
  if (!status.ok()) close(id, "could not be watched");
}

void SessionTable::turn_away(UniqueFd socket, const Status& status) {
  abi::Refused refused{status.code(), {}};
  abi::set_text(refused.text, status.message().data(), status.message().size());
  (void)send_message(socket.get(), abi::AttachType::kRefused, refused);
  hang_up(std::move(socket));
}

void SessionTable::receive(std::uint64_t id) {
  for (int i = 0; i < kPacketsPerTurn; ++i) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Session& session = found->second;
    Packet packet;
    Status error;
    switch (receive_from_peer(session.socket.get(), packet, error)) {
      case PeerResult::kNothing: return;
      case PeerResult::kClosed: close(id, "died"); return;
      case PeerResult::kMalformed: malformed(session, 0, error); return;
      case PeerResult::kDescriptors: receive_descriptors(session, packet); break;
      case PeerResult::kPacket: handle(session, packet, {}); break;
    }
  }
}

// Memory of the client's own comes with a Join, and nothing else comes with descriptors.
void SessionTable::receive_descriptors(Session& session, Packet& packet) {
  const bool join =
      session.attached && static_cast<abi::AttachType>(packet.header.type) == abi::AttachType::kJoin;
  const std::size_t allowed = join ? abi::kNumRegions : 0;
  const Airlock::Received received = airlock_.receive(session.socket.get(), session.peer.uid, packet);
  if (packet.header.num_fds > allowed) {
    malformed(session, packet.header.request_id,
              invalid_argument("message carries " + std::to_string(packet.header.num_fds) +
                               " descriptors; allowed: " + std::to_string(allowed)));
  } else if (received.status.ok() || received.not_memory) {
    handle(session, packet, received);
  } else {
    malformed(session, packet.header.request_id, received.status);
  }
}

void SessionTable::handle(Session& session, Packet& packet, const Airlock::Received& descriptors) {
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
    if (descriptors.not_memory) {
      return refuse(session.id, request_id,
                    invalid_argument("the memory that " +
                                     abi::bound_names(join->bindings, *descriptors.not_memory + 1) +
                                     " is bound to: " + descriptors.status.message()));
    }
    host_.join_requested(session, request_id, *join, std::move(packet.fds));
  } else if (type == abi::AttachType::kLeave) {
    Result<abi::Leave> leave = packet.read<abi::Leave>();
    if (!leave.ok()) return malformed(session, request_id, leave.status());
    if (!expect_reply(session, type, request_id)) return;
    host_.leave_requested(session, request_id, *leave);
  } else {
    malformed(session, request_id,
              invalid_argument("message type is " + std::to_string(packet.header.type) +
                               "; allowed: 4 (Join), 6 (Leave), 9 (Detach, without a body)"));
  }
}

// False: it is answered already.
bool SessionTable::expect_reply(Session& session, abi::AttachType type, std::uint32_t request_id) {
  const std::size_t pending = session.pending_requests.size();
  if (!session.pending_requests.insert(request_id).second) {
    malformed(session, request_id,
              invalid_argument("request id is " + std::to_string(request_id) +
                               "; allowed: those of no request that still waits for its reply"));
    return false;
  }
  if (type != abi::AttachType::kJoin || pending < abi::kMaxPendingRequests) return true;
  refuse(session.id, request_id,
         resource_exhausted("session " + std::to_string(session.id) + " has " + std::to_string(pending) +
                            " requests without a reply; allowed before another join: fewer than " +
                            std::to_string(abi::kMaxPendingRequests)));
  return false;
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
  session.pending_requests.insert(request_id);
  refuse(session.id, request_id, error);
  end_segments(session.segments, error);
  close(session.id, "broke the attach protocol");
}

void SessionTable::send_reply(std::uint64_t session_id, std::uint32_t request_id, std::uint16_t type,
                              const void* body, std::size_t bytes, const FdList& fds) {
  const auto found = connections_.find(session_id);
  if (found == connections_.end() || found->second.pending_requests.erase(request_id) == 0) return;
  Status status = send_packet(found->second.socket.get(), type, request_id, body, bytes, fds);
  if (status.ok()) return;
  // It does not read, or is dead: shutting down lets its end arrive as usual, outside this call.
  log_event(LogLevel::kWarning, "reply not sent", {{"session", session_id}, {"reason", status.message()}});
  ::shutdown(found->second.socket.get(), SHUT_RDWR);
}

void SessionTable::refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status) {
  abi::Refused refused{status.code(), {}};
  abi::set_text(refused.text, status.message().data(), status.message().size());
  reply(session_id, request_id, abi::AttachType::kRefused, refused);
}

void SessionTable::end(std::uint64_t session_id, const Status& status) {
  const auto found = connections_.find(session_id);
  if (found == connections_.end()) return;
  Session& session = found->second;
  end_segments(session.segments, status);
  abi::Goodbye goodbye{status.code(), {}};
  abi::set_text(goodbye.text, status.message().data(), status.message().size());
  (void)send_message(session.socket.get(), abi::AttachType::kGoodbye, goodbye);
  close(session_id, "was ended: " + status.message());
}

void SessionTable::end_all(const Status& status) {
  while (!connections_.empty()) end(connections_.begin()->first, status);
}

void SessionTable::close(std::uint64_t id, const std::string& how) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  // Out of the table first: the host may look at it.
  Session session = std::move(connections_.extract(found).mapped());
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, session.socket.get(), nullptr);
  hang_up(std::move(session.socket));
  if (!session.attached) return;
  --attached_;
  record_of_user(session.peer.uid, EventKind::kSessionEnded, LogLevel::kInfo, "session closed",
                 {{"session", id}, {"uid", session.peer.uid}, {"pid", session.peer.pid}, {"how", how}});
  host_.session_closed(std::move(session), how);
}

void SessionTable::hang_up(UniqueFd socket) {
  Airlock::read_out(socket.get());
  airlock_.close_socket(std::move(socket));
}

void SessionTable::stop_listening() {
  if (listener_.fd() < 0) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
  airlock_.close_socket(listener_.close());  // who has not been accepted may have sent something already
  listen_again_ns_ = 0;
}

void SessionTable::tick() {
  const std::uint64_t now = clock_.now_ns();
  if (listen_again_ns_ != 0 && listen_again_ns_ <= now) {
    listen_again_ns_ = 0;
    if (!watch(listener_.fd(), kListenerKey).ok()) listen_again_ns_ = now + 1'000'000'000;
  }
  const std::uint64_t allowed_ns = std::uint64_t{options_.limits.attach_timeout_ms} * 1'000'000;
  std::vector<std::uint64_t> due;
  for (const auto& [id, session] : connections_) {
    if (!session.attached && session.accepted_ns + allowed_ns <= now) due.push_back(id);
  }
  for (const std::uint64_t id : due) {
    Session& session = connections_.at(id);
    ++total_refused_;
    session.pending_requests.insert(0);
    refuse(id, 0,
           {StatusCode::kDeadlineExceeded,
            "no Hello within " + std::to_string(options_.limits.attach_timeout_ms) + " ms"});
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection closed: no Hello in time",
                   {{"uid", session.peer.uid}, {"pid", session.peer.pid}}, session.peer.uid);
    close(id, "said no Hello");
  }
}

std::uint64_t SessionTable::next_due_ns() const {
  std::uint64_t due = std::numeric_limits<std::uint64_t>::max();
  if (listen_again_ns_ != 0) due = listen_again_ns_;
  const std::uint64_t allowed_ns = std::uint64_t{options_.limits.attach_timeout_ms} * 1'000'000;
  for (const auto& [id, session] : connections_) {
    if (!session.attached) due = std::min(due, session.accepted_ns + allowed_ns);
  }
  return due;
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

}  // namespace epd
