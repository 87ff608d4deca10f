#include "base/gate.h"

#include "base/departure.h"
#include "base/log.h"
#include "base/own_table.h"
#include "base/packet.h"
#include "base/thread.h"

#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

namespace epd {

// What the loop and the threads share.
struct GateShared {
  struct Task {
    pid_t tid;
    std::uint32_t uid;
    bool done = false;  // with its work: what it had may still be closing
  };

  Gate::MakePorter make;
  std::mutex mutex;
  std::map<std::uint64_t, PeerIdentity> arrived;  // guarded by mutex; by number, until take()
  std::map<std::uint64_t, Task> porters;          // likewise
};

namespace {

constexpr int kRetryMs = 200;  // when there is no room for a descriptor or a thread

struct PorterStart {
  std::shared_ptr<GateShared> shared;
  std::uint64_t number = 0;
  std::uint32_t uid = 0;
  Doorstep doorstep;
  Porter porter;  // none: the connection only has to end
  Departure departure;
};

void* run_porter(void* argument) {
  const std::unique_ptr<std::shared_ptr<PorterStart>> own(
      static_cast<std::shared_ptr<PorterStart>*>(argument));
  PorterStart& start = **own;
  GateShared& shared = *start.shared;
  {
    const std::lock_guard lock(shared.mutex);
    shared.porters[start.number] = {::gettid(), start.uid};
  }
  if (start.departure.leave({start.doorstep.peer, start.doorstep.inner, start.doorstep.process})) {
    try {
      if (start.porter) start.porter(start.doorstep);
    } catch (const std::exception& error) {
      log_event(LogLevel::kError, "connection lost", {{"uid", start.uid}, {"reason", error.what()}});
    }
    start.porter = nullptr;
  }
  const std::lock_guard lock(shared.mutex);
  shared.porters[start.number].done = true;
  return nullptr;
}

// The gate's thread, in a table of its own: it has one connection in hand at a time, or none.
class GateThread {
 public:
  GateThread(std::shared_ptr<GateShared> shared, int listener, int channel)
      : shared_(std::move(shared)), listener_(listener), channel_(channel) {
    socklen_t length = sizeof(type_);
    ::getsockopt(listener, SOL_SOCKET, SO_TYPE, &type_, &length);
  }

  bool leave() { return departure_.leave({listener_, channel_}); }
  Departure& departure() { return departure_; }

  void run() {
    while (wait(listener_, POLLIN)) {
      try {
        if (!accept()) return;
      } catch (const std::exception& error) {
        if (!pause(error.what())) return;
      }
    }
  }

 private:
  // False, as below: nobody wants to know any more.
  bool accept() {
    const int socket = own_table::accept(listener_);
    if (socket >= 0) return serve(socket);
    const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED;
    return later || pause(errno_status("accept").message());
  }

  bool serve(int socket) {
    Result<PeerIdentity> peer = peer_identity(socket);  // else it has gone
    const int process = peer.ok() ? peer->pidfd.release() : -1;
    int inner[2];
    while (!own_table::make_pair(type_, inner)) {
      if (!pause(errno_status("socketpair").message())) return false;
    }
    const std::uint64_t number = ++last_number_;
    const auto start = std::make_shared<PorterStart>();
    start->shared = shared_;
    start->number = number;
    start->uid = peer.ok() ? peer->uid : 0;
    start->doorstep = {socket, inner[1], process};
    if (peer.ok()) start->porter = shared_->make(number, *peer);
    if (!start_porter(start)) return false;
    own_table::close(socket);
    own_table::close(inner[1]);
    start->departure.let_go();
    const bool told = !peer.ok() || announce(number, std::move(*peer), inner[0], process);
    own_table::close(inner[0]);
    own_table::close(process);
    return told;
  }

  // Waits for room for it: the connection can be closed nowhere else.
  bool start_porter(const std::shared_ptr<PorterStart>& start) {
    for (;;) {
      auto own = std::make_unique<std::shared_ptr<PorterStart>>(start);
      Status status = start_detached_thread(run_porter, own.get());
      if (status.ok()) {
        (void)own.release();
        if (start->departure.has_left()) return true;
        start->departure.try_again();
        status = Status(StatusCode::kResourceExhausted, "no room for another table of descriptors");
      }
      if (!pause(status.message())) return false;
    }
  }

  bool announce(std::uint64_t number, PeerIdentity peer, int inner, int process) {
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->arrived.emplace(number, std::move(peer));
    }
    const int fds[2] = {inner, process};
    const std::size_t bytes = (process < 0 ? 1 : 2) * sizeof(int);
    iovec part{&number, sizeof(number)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(c), fds, bytes);
    while (own_table::send(channel_, message, MSG_DONTWAIT) < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait(channel_, POLLOUT)) return false;
      } else if (errno == EPIPE || errno == ECONNRESET) {
        return false;
      } else if (errno != EINTR && !pause(errno_status("a connection's descriptors").message())) {
        return false;
      }
    }
    return true;
  }

  bool wait(int fd, short events, int timeout_ms = -1) const {
    pollfd entries[2] = {{channel_, 0, 0}, {fd, events, 0}};
    own_table::poll(entries, 2, timeout_ms);
    return entries[0].revents == 0;  // else its other end has gone
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
  Departure departure_;
};

void* run_gate(void* argument) {
  const std::unique_ptr<std::shared_ptr<GateThread>> own(static_cast<std::shared_ptr<GateThread>*>(argument));
  if ((*own)->leave()) (*own)->run();
  return nullptr;
}

bool lives(pid_t tid) {
  return ::syscall(SYS_tgkill, ::getpid(), tid, 0) == 0;
}

}  // namespace

Result<std::unique_ptr<Gate>> Gate::open(UniqueFd listener, MakePorter make) {
  Result<std::pair<UniqueFd, UniqueFd>> channel = make_socketpair();
  if (!channel.ok()) return channel.status();
  const auto shared = std::make_shared<GateShared>();
  shared->make = std::move(make);
  const auto thread = std::make_shared<GateThread>(shared, listener.get(), channel->second.get());
  auto own = std::make_unique<std::shared_ptr<GateThread>>(thread);
  (void)log_enabled(LogLevel::kError);  // the log's thread, if it began in a porter, would keep its table
  if (Status status = start_detached_thread(run_gate, own.get()); !status.ok()) return status;
  (void)own.release();
  if (!thread->departure().has_left())
    return Status(StatusCode::kResourceExhausted, "no room for another table of descriptors");
  listener.reset();
  channel->second.reset();
  thread->departure().let_go();
  return std::unique_ptr<Gate>(new Gate(shared, std::move(channel->first)));
}

Gate::~Gate() = default;

std::optional<Gate::Arrival> Gate::take() {
  Arrival arrival;
  iovec part{&arrival.number, sizeof(arrival.number)};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(channel_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n != sizeof(arrival.number)) return std::nullopt;
  std::vector<UniqueFd> fds;
  append_descriptors(message, fds);
  const std::lock_guard lock(shared_->mutex);
  arrival.peer = std::move(shared_->arrived.extract(arrival.number).mapped());
  if (!fds.empty()) arrival.socket = std::move(fds[0]);
  if (fds.size() > 1) arrival.peer.pidfd = std::move(fds[1]);
  return arrival;
}

std::size_t Gate::porters(std::optional<std::uint32_t> uid) const {
  const std::lock_guard lock(shared_->mutex);
  std::erase_if(shared_->porters,
                [](const auto& entry) { return entry.second.done && !lives(entry.second.tid); });
  return static_cast<std::size_t>(
      std::count_if(shared_->porters.begin(), shared_->porters.end(),
                    [&](const auto& entry) { return !uid || entry.second.uid == *uid; }));
}

}  // namespace epd
