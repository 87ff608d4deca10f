#include "door.h"

#include "base/clock.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kListenerId = 0;
constexpr std::uint64_t kWakeId = 1;
constexpr std::uint64_t kFirstByteNs = 5'000'000'000;
constexpr std::uint64_t kProbeNs = 1'000'000'000;
constexpr int kBacklog = 128;
constexpr int kTickMs = 500;              // for deadlines, while there are any
constexpr unsigned char kTlsRecord = 22;  // a handshake
constexpr unsigned char kHttp2 = 'P';     // of its preface

std::uint64_t now_ns() {
  return MonotonicClock().now_ns();
}

}  // namespace

Result<std::unique_ptr<Door>> Door::open(Options options, Refusals& refusals) {
  std::unique_ptr<Door> door(new Door(std::move(options), refusals));
  if (Status status = door->listen(); !status.ok()) return status;
  return door;
}

Status Door::begin() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the cluster's port: ") + error.what());
  }
  return {};
}

Door::~Door() {
  stop();
}

Status Door::listen() {
  const std::string where = to_string(options_.listen);
  listener_.reset(::socket(options_.listen.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) return errno_status("cluster.listen = \"" + where + "\": socket");
  const int on = 1;
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(listener_.get(), options_.listen.get(), options_.listen.size) != 0 ||
      ::listen(listener_.get(), kBacklog) != 0) {
    return errno_status("cluster.listen = \"" + where + "\" can't be opened");
  }
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return errno_status("epoll_create1");
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();
  wake_ = std::move(*wake);
  if (!watch(listener_.get(), kListenerId, EPOLLIN) || !watch(wake_.get(), kWakeId, EPOLLIN))
    return errno_status("epoll_ctl");
  return {};
}

bool Door::watch(int fd, std::uint64_t id, std::uint32_t events, bool again) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return ::epoll_ctl(epoll_.get(), again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) == 0;
}

void Door::opened_stream(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  const auto streams = streams_.find(peer);
  if (streams == streams_.end()) return;  // the connection has ended meanwhile
  streams->second.any = true;
  ++streams->second.open;
}

void Door::closed_stream(const std::string& peer) {
  const std::lock_guard lock(mutex_);
  const auto streams = streams_.find(peer);
  if (streams != streams_.end() && streams->second.open > 0) --streams->second.open;
}

const Door::Streams* Door::streams_of(std::uint64_t id, const Connection& connection) const {
  const auto streams = streams_.find(connection.peer);
  return streams != streams_.end() && streams->second.connection == id ? &streams->second : nullptr;
}

void Door::probe(const SocketAddress& address, std::function<void(bool refused)> answer) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || wanted_.size() >= kMaxConnections) return;
    wanted_.push_back({address, std::move(answer)});
  }
  ring_eventfd(wake_.get());
}

void Door::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (!thread_.joinable()) return;
  ring_eventfd(wake_.get());
  thread_.join();
}

void Door::run() {
  ::prctl(PR_SET_NAME, "epd-cluster");
  std::array<epoll_event, 64> events{};
  while (!stopping_now_) {
    const bool deadlines =
        !probes_.empty() || std::any_of(connections_.begin(), connections_.end(),
                                        [](const auto& c) { return !c.second.handed_over; });
    const int n = ::epoll_wait(epoll_.get(), events.data(), events.size(), deadlines ? kTickMs : -1);
    for (int i = 0; i < n; ++i) {
      const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64;
      if (id == kListenerId) {
        take_in();
      } else if (id == kWakeId) {
        std::uint64_t count;
        [[maybe_unused]] const ssize_t size = ::read(wake_.get(), &count, sizeof(count));
        begin_probes();
      } else if (probes_.count(id) != 0) {
        end_probe(id);
      } else if (const auto found = connections_.find(id); found != connections_.end()) {
        found->second.handed_over ? ended(id, found->second) : look(id, found->second);
      }
    }
    if (deadlines) end_late();
  }
}

void Door::take_in() {
  for (int i = 0; i < kBacklog; ++i) {
    SocketAddress address;
    address.size = sizeof(address.bytes);
    UniqueFd fd(::accept4(listener_.get(), address.get(), &address.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      // Out of descriptors: the connection stays where it is. Not to be asked again at once.
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) ::usleep(kTickMs * 1000);
      return;
    }
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    std::string peer = to_string(address);
    std::string host = parse_host_port(peer)->host;
    if (Status room = make_room(host); !room.ok()) {
      refusals_.refuse(Who::kStranger, Refusal::kConnections, peer, "", room.message());
      continue;
    }
    const std::uint64_t id = ++last_id_;
    if (!watch(fd.get(), id, EPOLLIN | EPOLLRDHUP)) continue;
    ++of_address_[host];
    connections_[id] = {std::move(fd), std::move(peer), std::move(host), false, now_ns() + kFirstByteNs};
  }
}

Status Door::make_room(const std::string& host) {
  const auto there_are = [](std::size_t many, const char* what) {
    return "there are " + std::to_string(many) + " connections" + what + " already";
  };
  const auto of_host = of_address_.find(host);
  if (of_host != of_address_.end() && of_host->second >= options_.max_of_address)
    return end_oldest(&host, there_are(options_.max_of_address, " of its address"));
  if (connections_.size() < options_.max_connections) return {};
  return end_oldest(nullptr, there_are(options_.max_connections, ""));
}

Status Door::end_oldest(const std::string* host, const std::string& full) {
  auto oldest = connections_.begin();
  {
    const std::lock_guard lock(mutex_);
    const auto may_stay = [&](std::uint64_t id, const Connection& connection) {
      if (host != nullptr && connection.host != *host) return true;
      const Streams* streams = streams_of(id, connection);
      return streams != nullptr && streams->open > 0;
    };
    while (oldest != connections_.end() && may_stay(oldest->first, oldest->second)) ++oldest;
  }
  if (oldest == connections_.end()) return resource_exhausted(full);
  refusals_.refuse(Who::kStranger, Refusal::kConnections, oldest->second.peer, "",
                   full + "; of those without an open stream it is the oldest, and makes room for another");
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, oldest->second.fd.get(), nullptr);
  ::shutdown(oldest->second.fd.get(), SHUT_RDWR);  // gRPC may have a copy
  forget(oldest->first);
  return {};
}

void Door::forget(std::uint64_t id) {
  const auto connection = connections_.find(id);
  const auto count = of_address_.find(connection->second.host);
  if (--count->second == 0) of_address_.erase(count);
  {
    const std::lock_guard lock(mutex_);
    if (streams_of(id, connection->second) != nullptr) streams_.erase(connection->second.peer);
  }
  connections_.erase(connection);
}

// A connection that has something to say, or has ended.
void Door::look(std::uint64_t id, Connection& connection) {
  unsigned char first = 0;
  const ssize_t n = ::recv(connection.fd.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {  // it has only looked whether anybody listens
    forget(id);
    return;
  }
  if (first != (options_.secure ? kTlsRecord : kHttp2)) {
    refusals_.refuse(Who::kStranger, Refusal::kPlainText, connection.peer, "",
                     options_.secure ? "it does not begin with TLS, which this port speaks"
                                     : "it does not begin with HTTP/2 in plain text, which this port speaks");
    forget(id);
    return;
  }
  UniqueFd copy(::fcntl(connection.fd.get(), F_DUPFD_CLOEXEC, 0));
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd.get(), nullptr);
  if (!copy.valid() || !watch(copy.get(), id, 0)) {  // that both directions have ended is always told
    forget(id);
    return;
  }
  UniqueFd original = std::exchange(connection.fd, std::move(copy));
  connection.handed_over = true;
  {
    const std::lock_guard lock(mutex_);
    streams_[connection.peer] = {id, false, 0};
  }
  options_.hand_over(std::move(original));
}

void Door::ended(std::uint64_t id, Connection& connection) {
  bool had_stream = false;
  {
    const std::lock_guard lock(mutex_);
    const Streams* streams = streams_of(id, connection);
    had_stream = streams != nullptr && streams->any;
  }
  if (!had_stream) {
    refusals_.refuse(Who::kStranger, Refusal::kHandshake, connection.peer, "",
                     options_.secure
                         ? "the TLS handshake failed, so one of the two does not accept the other's "
                           "certificate, or the connection ended early"
                         : "it is no daemon's connection, or it ended early");
  }
  // gRPC's descriptor of it may stay open, and would keep the watch.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd.get(), nullptr);
  forget(id);
}

void Door::begin_probes() {
  std::deque<WantedProbe> wanted;
  {
    const std::lock_guard lock(mutex_);
    stopping_now_ = stopping_;
    wanted.swap(wanted_);
  }
  for (WantedProbe& one : wanted) {
    UniqueFd fd(::socket(one.address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) continue;
    const int result = ::connect(fd.get(), one.address.get(), one.address.size);
    if (result == 0 || errno != EINPROGRESS) {
      one.answer(result != 0 && errno == ECONNREFUSED);
      continue;
    }
    const std::uint64_t id = ++last_id_;
    if (watch(fd.get(), id, EPOLLOUT))
      probes_[id] = {std::move(fd), std::move(one.answer), now_ns() + kProbeNs};
  }
}

void Door::end_probe(std::uint64_t id) {
  const auto node = probes_.extract(id);
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(node.mapped().fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  node.mapped().answer(error == ECONNREFUSED);
}

// Nobody answers: that says nothing of a probe, and enough of a connection.
void Door::end_late() {
  const std::uint64_t now = now_ns();
  std::erase_if(probes_, [&](const auto& probe) { return now >= probe.second.due_ns; });
  std::vector<std::uint64_t> late;
  for (const auto& [id, connection] : connections_) {
    if (connection.handed_over || now < connection.due_ns) continue;
    refusals_.refuse(Who::kStranger, Refusal::kHandshake, connection.peer, "", "it has said nothing for 5 s");
    late.push_back(id);
  }
  for (const std::uint64_t id : late) forget(id);
}

}  // namespace epd::cluster
