#include "base/gate.h"

#include "base/event.h"
#include "base/own_table.h"
#include "base/thread.h"
#include "common/descriptor_message.h"
#include "common/fd.h"
#include "dismissals.h"

#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

namespace epd {

// The state that the loop and the threads share.
struct GateShared {
  struct Connection {
    std::uint32_t uid = 0;
    PeerIdentity peer;   // until take()
    bool taken = false;  // by the loop
    pid_t tid = 0;       // of its porter
    bool done = false;   // the porter is done; its descriptors may still be closing
  };

  Gate::MakePorter make;
  Gate::LastWords last_words;
  std::atomic<std::uint64_t> dismissed{0};
  std::mutex mutex;
  Gate::Limits limits;                              // guarded by mutex
  std::map<std::uint64_t, Connection> connections;  // guarded by mutex; by number, until their tasks end

  std::chrono::steady_clock::time_point next_look;  // guarded by mutex
  std::size_t done_since_look = 0;                  // guarded by mutex

  void forget_ended();
  // OK, or the reason why the connection is one too many.
  Status check_room(const PeerIdentity& peer);
};

namespace {

constexpr int kRetryMs = 200;      // when there is no room for a descriptor, a thread, or memory
constexpr int kDismissalsMs = 20;  // until waiting dismissals are tried again
constexpr std::chrono::milliseconds kLookEvery(10);
constexpr std::size_t kLookAfter = 16;  // connections that are done

struct PorterStart {
  std::shared_ptr<GateShared> shared;
  std::uint64_t number = 0;
  Doorstep doorstep;
  Porter porter;
  Departure departure;
};

// An exception of a porter ends its connection.
void work(const PorterStart& start) {
  try {
    start.porter(start.doorstep);
  } catch (const std::exception& error) {
    log_event(LogLevel::kError, "connection lost", {{"reason", error.what()}});
  }
}

void* run_porter(void* argument) {
  const std::unique_ptr<std::shared_ptr<PorterStart>> own(
      static_cast<std::shared_ptr<PorterStart>*>(argument));
  PorterStart& start = **own;
  GateShared& shared = *start.shared;
  const std::array keep = {start.doorstep.peer, start.doorstep.inner, start.doorstep.process};
  if (!start.departure.leave(keep)) return nullptr;
  {
    const std::lock_guard lock(shared.mutex);
    shared.connections.at(start.number).tid = ::gettid();
  }
  work(start);
  start.porter = nullptr;
  const std::lock_guard lock(shared.mutex);
  shared.connections.at(start.number).done = true;
  ++shared.done_since_look;
  return nullptr;
}

// The gate's thread, with its own descriptor table. It handles at most one connection at a time.
class GateThread {
 public:
  GateThread(std::shared_ptr<GateShared> shared, int listener, int channel)
      : shared_(std::move(shared)), listener_(listener), channel_(channel) {
    socklen_t length = sizeof(type_);
    ::getsockopt(listener, SOL_SOCKET, SO_TYPE, &type_, &length);
  }

  bool leave() { return departure_.leave(std::array{listener_, channel_}); }
  Departure& departure() { return departure_; }

  void run() {
    while (wait(listener_, POLLIN, dismissals_.waiting() ? kDismissalsMs : -1)) {
      const int socket = own_table::accept(listener_);
      const bool no_room =
          socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS);
      if (socket >= 0 && !serve(socket)) return;
      if (no_room && !pause(std::strerror(errno))) return;
      const auto run_dismissals = [&] {
        dismissals_.run(no_room);
        return Status();
      };
      if (!insist(run_dismissals)) return;
    }
  }

 private:
  // False, here and below: the gate has ended.
  bool serve(int socket) {
    PeerIdentity peer;
    bool dismissed = false;
    int inner[2];
    std::shared_ptr<PorterStart> start;
    const auto know = [&] {
      Result<PeerIdentity> known = peer_identity(socket);
      if (!known.ok()) return known.status();
      peer = std::move(*known);
      return Status();
    };
    const auto judge = [&] {
      dismissed = dismiss(peer, socket);
      return Status();
    };
    if (!insist(know)) return false;
    const int process = peer.pidfd.release();  // closed by the system call for this table
    if (!insist(judge)) return false;
    if (dismissed) {
      own_table::close(process);
      return true;
    }
    const std::uint64_t number = ++last_number_;
    const auto connect = [&] {
      return own_table::make_pair(type_, inner) ? Status() : errno_status("socketpair");
    };
    const auto prepare = [&] {
      start = std::make_shared<PorterStart>();
      start->shared = shared_;
      start->number = number;
      start->doorstep = {socket, inner[1], process};
      start->porter = shared_->make(number, peer);
      note(number, peer);
      return Status();
    };
    if (!insist(connect) || !insist(prepare) || !insist([&] { return start_porter(start); })) return false;
    own_table::close(socket);
    own_table::close(inner[1]);
    start->departure.permit();
    const bool told = announce(number, inner[0], process);
    own_table::close(inner[0]);
    own_table::close(process);
    return told;
  }

  // The peer has ended, or a thread for it would be one too many.
  bool dismiss(const PeerIdentity& peer, int socket) {
    if (peer.has_been_reaped) {
      dismissals_.add(peer.uid, socket, {});
      return true;
    }
    const Status status = shared_->check_room(peer);
    if (status.ok()) return false;
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection refused",
                   {{"uid", peer.uid}, {"pid", peer.pid}, {"reason", status.message()}}, peer.uid);
    std::vector<std::byte> last_words;
    if (shared_->last_words) last_words = shared_->last_words(status);
    dismissals_.add(peer.uid, socket, std::move(last_words));  // last: it owns the socket from now on
    ++shared_->dismissed;
    return true;
  }

  // Repeats `step` until there is room for what it needs. The connection in hand can't be closed anywhere
  // else.
  template <typename Step>
  bool insist(const Step& step) const {
    for (;;) {
      Status status;
      try {
        status = step();
      } catch (const std::exception& error) {
        status = internal_error(error.what());
      }
      if (status.ok()) return true;
      if (!pause(status.message())) return false;
    }
  }

  void note(std::uint64_t number, const PeerIdentity& peer) {
    const std::lock_guard lock(shared_->mutex);
    GateShared::Connection& connection = shared_->connections[number];
    connection.uid = peer.uid;
    connection.peer.pid = peer.pid;
    connection.peer.uid = peer.uid;
    connection.peer.gid = peer.gid;
    connection.peer.gids = peer.gids;
  }

  static Status start_porter(const std::shared_ptr<PorterStart>& start) {
    start->departure.try_again();
    auto own = std::make_unique<std::shared_ptr<PorterStart>>(start);
    if (Status status = start_detached_thread(run_porter, own.get()); !status.ok()) return status;
    (void)own.release();
    return start->departure.has_left() ? Status()
                                       : resource_exhausted("no room for another table of descriptors");
  }

  bool announce(std::uint64_t number, int inner, int process) const {
    const int fds[2] = {inner, process};
    iovec part{&number, sizeof(number)};
    DescriptorMessage message({&part, 1}, std::span(fds).first(process < 0 ? 1 : 2));
    while (own_table::send(channel_, message.header(), MSG_DONTWAIT) < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait(channel_, POLLOUT)) return false;
      } else if (errno == EPIPE || errno == ECONNRESET) {
        return false;
      } else if (errno != EINTR && !pause(std::strerror(errno))) {
        return false;
      }
    }
    return true;
  }

  bool wait(int fd, short events, int timeout_ms = -1) const {
    pollfd entries[2] = {{channel_, 0, 0}, {fd, events, 0}};
    own_table::poll(entries, 2, timeout_ms);
    return entries[0].revents == 0;  // otherwise its other end is closed
  }

  bool pause(const std::string& reason) const {
    static LogLimiter limiter;
    limiter.log(LogLevel::kError, "cannot accept connections, trying again", {{"reason", reason}});
    return wait(-1, 0, kRetryMs);
  }

  std::shared_ptr<GateShared> shared_;
  const int listener_;
  const int channel_;
  int type_ = SOCK_SEQPACKET;
  std::uint64_t last_number_ = 0;
  Dismissals dismissals_;
  Departure departure_;
};

void* run_gate(void* argument) {
  const std::unique_ptr<std::shared_ptr<GateThread>> own(static_cast<std::shared_ptr<GateThread>*>(argument));
  if ((*own)->leave()) (*own)->run();
  return nullptr;
}

}  // namespace

// This costs a system call for each connection that has ended, so it is not done at each arrival of a flood.
// But it is done often enough that a user who opens sessions one after the other is not refused.
void GateShared::forget_ended() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look && done_since_look < kLookAfter) return;
  done_since_look = 0;
  next_look = now + kLookEvery;
  std::erase_if(connections, [](const auto& entry) {
    const Connection& connection = entry.second;
    return connection.taken && connection.done && !task_lives(connection.tid);
  });
}

Status GateShared::check_room(const PeerIdentity& peer) {
  const std::lock_guard lock(mutex);
  forget_ended();
  const auto of_user =
      static_cast<std::size_t>(std::count_if(connections.begin(), connections.end(), [&](const auto& entry) {
        return entry.second.uid == peer.uid;
      }));
  const bool privileged = is_privileged(peer.uid);  // other users can't keep them out
  const std::size_t allowed = privileged ? limits.all : limits.per_user;
  const auto too_many = [this](const std::string& who, std::size_t count, std::size_t most) {
    return resource_exhausted(who + " " + std::to_string(count) +
                              " connections, open or still being closed; allowed: " + std::to_string(most) +
                              limits.hint);
  };
  if (of_user >= allowed) return too_many("user " + std::to_string(peer.uid) + " has", of_user, allowed);
  if (connections.size() >= limits.all && !privileged)
    return too_many("all users have", connections.size(), limits.all);
  return {};
}

Result<std::unique_ptr<Gate>> Gate::open(UniqueFd listener, MakePorter make, Limits limits,
                                         LastWords last_words) {
  Result<std::pair<UniqueFd, UniqueFd>> channel = make_socketpair();
  if (!channel.ok()) return channel.status();
  const auto shared = std::make_shared<GateShared>();
  shared->make = std::move(make);
  shared->last_words = std::move(last_words);
  shared->limits = limits;
  const auto thread = std::make_shared<GateThread>(shared, listener.get(), channel->second.get());
  auto own = std::make_unique<std::shared_ptr<GateThread>>(thread);
  (void)log_lines_lost();  // starts the log's thread here: started by a porter, it would keep the porter's
                           // table
  if (Status status = start_detached_thread(run_gate, own.get()); !status.ok()) return status;
  (void)own.release();
  if (!thread->departure().has_left()) return resource_exhausted("no room for another table of descriptors");
  listener.reset();
  channel->second.reset();
  thread->departure().permit();
  return std::unique_ptr<Gate>(new Gate(shared, std::move(channel->first)));
}

Gate::~Gate() = default;

void Gate::set_limits(Limits limits) {
  const std::lock_guard lock(shared_->mutex);
  shared_->limits = limits;
}

std::uint64_t Gate::dismissed() const {
  return shared_->dismissed;
}

std::optional<Gate::Arrival> Gate::take() {
  Arrival arrival;
  iovec part{&arrival.number, sizeof(arrival.number)};
  DescriptorMessage message({&part, 1});
  const ssize_t n = ::recvmsg(channel_.get(), &message.header(), MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n != sizeof(arrival.number)) return std::nullopt;
  std::vector<UniqueFd> fds;
  message.take_descriptors(fds);
  const std::lock_guard lock(shared_->mutex);
  const auto found = shared_->connections.find(arrival.number);
  EPD_CHECK(found != shared_->connections.end());
  found->second.taken = true;
  arrival.peer = std::move(found->second.peer);
  if (!fds.empty()) arrival.socket = std::move(fds[0]);
  if (fds.size() > 1) arrival.peer.pidfd = std::move(fds[1]);
  return arrival;
}

std::size_t Gate::porters(std::optional<std::uint32_t> uid) const {
  const std::lock_guard lock(shared_->mutex);
  shared_->forget_ended();
  return static_cast<std::size_t>(std::count_if(
      shared_->connections.begin(), shared_->connections.end(),
      [&](const auto& entry) { return entry.second.taken && (!uid || entry.second.uid == *uid); }));
}

}  // namespace epd
