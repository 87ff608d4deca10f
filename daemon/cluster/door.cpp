#include "door.h"

#include "base/clock.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>
#include <vector>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kListenerId = 0;
constexpr std::uint64_t kWakeId = 1;
constexpr std::uint64_t kInner = std::uint64_t{1} << 63;  // in the id of a connection's inner socket
constexpr std::uint32_t kBothWays = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
constexpr std::uint64_t kFirstByteNs = 5'000'000'000;
constexpr std::uint64_t kProbeNs = 1'000'000'000;
constexpr int kBacklog = 128;
constexpr int kTickMs = 500;  // for deadlines, while there are any
constexpr int kPauseMs = Gate::kPauseNs / 1'000'000;
constexpr unsigned char kTlsRecord = 22;  // a handshake
constexpr unsigned char kHttp2 = 'P';     // of its preface

const MonotonicClock kClock;

std::uint64_t now_ns() {
  return kClock.now_ns();
}

// Binds the socket to a name that the kernel chooses. Returns the name as gRPC writes it at the other end of
// the pair.
Result<std::string> name_socket(int fd) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  socklen_t size = sizeof(name.sun_family);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&name), size) != 0) return errno_status("bind");
  size = sizeof(name);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) return errno_status("getsockname");
  return "unix-abstract:" + std::string(name.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
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

Status Door::opened_stream(const std::string& key, const std::string& certificate, std::string* peer) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(key);
  if (found == streams_.end()) return {StatusCode::kAborted, "the connection has ended"};
  Stream& stream = found->second;
  if (peer != nullptr) *peer = stream.peer;
  if (stream.stage != Stage::kNoStream) return end_flood(stream, "it has opened two streams; allowed: one");
  stream.stage = Stage::kOpen;
  stream.certificate = certificate;
  const auto wait = waits_.find(certificate);
  if (wait == waits_.end() || now_ns() >= wait->second) return {};
  Status status =
      resource_exhausted("a connection of this certificate was ended for a flood; allowed: another one " +
                         std::to_string(kWaitNs / 1'000'000'000) + " s later");
  refusals_.refuse(Who::kNode, Refusal::kFlood, stream.peer, "", status.message());
  return status;
}

void Door::took_frame(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(key); found != streams_.end()) ++found->second.frames;
}

void Door::welcomed(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(key);
  if (found != streams_.end()) found->second.welcomed = true;
}

void Door::closed_stream(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(key);
  if (found != streams_.end()) found->second.stage = Stage::kClosed;
}

// The door's thread sees the shutdown.
Status Door::end_flood(Stream& stream, const std::string& why) {
  ::shutdown(stream.fd, SHUT_RDWR);
  if (std::exchange(stream.flooded, true)) return resource_exhausted(why);
  const std::uint64_t now = now_ns();
  std::erase_if(waits_, [&](const auto& wait) { return now >= wait.second; });
  if (!stream.certificate.empty()) waits_[stream.certificate] = now + kWaitNs;
  const Who who = stream.stage == Stage::kNoStream ? Who::kStranger : Who::kNode;
  refusals_.refuse(who, Refusal::kFlood, stream.peer, "", why);
  return resource_exhausted(why);
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
    const bool deadlines = !probes_.empty() || listen_ns_ != 0 ||
                           std::any_of(connections_.begin(), connections_.end(),
                                       [](const auto& c) { return c.second.gate == nullptr; });
    const int wait_ms = !pausing_.empty() ? kPauseMs : deadlines ? kTickMs : -1;
    const int n = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms);
    for (int i = 0; i < n; ++i) {
      const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64 & ~kInner;
      if (id == kListenerId) {
        take_in();
      } else if (id == kWakeId) {
        std::uint64_t count;
        [[maybe_unused]] const ssize_t size = ::read(wake_.get(), &count, sizeof(count));
        begin_probes();
      } else if (probes_.count(id) != 0) {
        end_probe(id);
      } else if (const auto found = connections_.find(id); found != connections_.end()) {
        found->second.gate != nullptr ? carry(id, found->second) : look(id, found->second);
      }
    }
    for (const std::uint64_t id : std::set(pausing_)) carry(id, connections_.at(id));
    if (deadlines) end_late();
    if (listen_ns_ != 0 && now_ns() >= listen_ns_) {
      watch(listener_.get(), kListenerId, EPOLLIN, true);
      listen_ns_ = 0;
    }
  }
  // Carries what gRPC sent last.
  for (auto& [id, connection] : connections_) {
    if (connection.gate != nullptr) (void)connection.gate->carry(0, 0);
  }
}

void Door::take_in() {
  for (int i = 0; i < kBacklog; ++i) {
    SocketAddress address;
    address.size = sizeof(address.bytes);
    UniqueFd fd(::accept4(listener_.get(), address.get(), &address.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      // Out of descriptors: the connection waits in the kernel. The listener is not asked again at once, and
      // this thread continues to carry the nodes' bytes.
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
        watch(listener_.get(), kListenerId, 0, true);
        listen_ns_ = now_ns() + std::uint64_t{kTickMs} * 1'000'000;
      }
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
    Connection& connection = connections_[id];
    connection.fd = std::move(fd);
    connection.peer = std::move(peer);
    connection.host = std::move(host);
    connection.due_ns = now_ns() + kFirstByteNs;
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
    const auto may_stay = [&](const Connection& connection) {
      if (host != nullptr && connection.host != *host) return true;
      const auto stream = streams_.find(connection.key);
      return stream != streams_.end() && stream->second.stage == Stage::kOpen;
    };
    while (oldest != connections_.end() && may_stay(oldest->second)) ++oldest;
  }
  if (oldest == connections_.end()) return resource_exhausted(full);
  refusals_.refuse(Who::kStranger, Refusal::kConnections, oldest->second.peer, "",
                   full + "; of those without an open stream it is the oldest, and makes room for another");
  forget(oldest->first);
  return {};
}

void Door::forget(std::uint64_t id) {
  const auto connection = connections_.find(id);
  const auto count = of_address_.find(connection->second.host);
  if (--count->second == 0) of_address_.erase(count);
  {
    const std::lock_guard lock(mutex_);
    streams_.erase(connection->second.key);
  }
  pausing_.erase(id);
  connections_.erase(connection);
}

// Looks at the first byte of a connection that has sent something or has ended.
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
  if (const Status status = hand_over(id, connection); !status.ok()) {
    refusals_.refuse(Who::kStranger, Refusal::kConnections, connection.peer, "", status.message());
    forget(id);
  }
}

Status Door::hand_over(std::uint64_t id, Connection& connection) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
    return errno_status("socketpair");
  UniqueFd inner(pair[0]);
  UniqueFd of_grpc(pair[1]);
  Result<std::string> key = name_socket(inner.get());
  if (!key.ok()) return key.status();
  if (!watch(connection.fd.get(), id, kBothWays, true) || !watch(inner.get(), id | kInner, kBothWays))
    return errno_status("epoll_ctl");
  connection.key = *key;
  connection.gate = std::make_unique<Gate>(kClock, connection.fd.get(), std::move(inner));
  {
    const std::lock_guard lock(mutex_);
    Stream& stream = streams_[connection.key];
    stream.fd = connection.fd.get();
    stream.peer = connection.peer;
  }
  options_.hand_over(std::move(of_grpc));
  carry(id, connection);
  return {};
}

void Door::carry(std::uint64_t id, Connection& connection) {
  bool flooded = false;
  bool welcomed = false;
  std::uint64_t frames = 0;
  {
    const std::lock_guard lock(mutex_);
    const Stream& stream = streams_.at(connection.key);
    flooded = stream.flooded;
    welcomed = stream.welcomed;
    frames = stream.frames;
  }
  if (flooded) {
    forget(id);
    return;
  }
  const std::uint64_t most = welcomed ? Gate::kForFrame : Gate::kBeforeHello;
  switch (connection.gate->carry(frames, most)) {
    case Gate::State::kWaits: pausing_.erase(id); return;
    case Gate::State::kPauses: pausing_.insert(id); return;
    case Gate::State::kEnded: ended(id, connection); return;
    case Gate::State::kFlood: break;
  }
  {
    const std::lock_guard lock(mutex_);
    (void)end_flood(streams_.at(connection.key),
                    "it has sent " + std::to_string(connection.gate->unheard()) +
                        (welcomed ? " bytes that make no frame" : " bytes before its Hello was taken") +
                        "; allowed: " + std::to_string(most) +
                        (welcomed ? "" : " with its certificates (epd check-config of a node judges them)"));
  }
  forget(id);
}

void Door::ended(std::uint64_t id, Connection& connection) {
  bool had_stream = false;
  {
    const std::lock_guard lock(mutex_);
    had_stream = streams_.at(connection.key).stage != Stage::kNoStream;
  }
  if (!had_stream) {
    refusals_.refuse(Who::kStranger, Refusal::kHandshake, connection.peer, "",
                     options_.secure
                         ? "the TLS handshake failed, so one of the two does not accept the other's "
                           "certificate, or the connection ended early"
                         : "it is no daemon's connection, or it ended early");
  }
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

// A probe without an answer is dropped. A connection without a first byte is refused.
void Door::end_late() {
  const std::uint64_t now = now_ns();
  std::erase_if(probes_, [&](const auto& probe) { return now >= probe.second.due_ns; });
  std::vector<std::uint64_t> late;
  for (const auto& [id, connection] : connections_) {
    if (connection.gate != nullptr || now < connection.due_ns) continue;
    refusals_.refuse(Who::kStranger, Refusal::kHandshake, connection.peer, "", "it has said nothing for 5 s");
    late.push_back(id);
  }
  for (const std::uint64_t id : late) forget(id);
}

}  // namespace epd::cluster
