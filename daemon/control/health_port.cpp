#include "health_port.h"

#include "base/log.h"
#include "base/network.h"
#include "base/thread.h"
#include "common/fd.h"
#include "health_service.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

namespace epd::control {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFresh(100);  // for so long what was heard of the supervisor counts
constexpr std::chrono::milliseconds kShutdownGrace(200);
constexpr int kBacklog = 64;
constexpr int kMaxMemory = 4 << 20;
constexpr int kMaxRequestBytes = 1 << 10;
constexpr int kMaxStreams = 4;  // of a connection
constexpr int kIdleConnectionMs = 60'000;
constexpr int kPauseMs = 200;  // after an error that only time can mend

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
};

std::string host_of(const Address& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes =
      address.bytes.ss_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6&>(address.bytes).sin6_addr)
          : &reinterpret_cast<const sockaddr_in&>(address.bytes).sin_addr;
  const char* host = ::inet_ntop(address.bytes.ss_family, bytes, text.data(), text.size());
  return host == nullptr ? "?" : host;
}

std::uint16_t port_of(const Address& address) {
  return ntohs(address.bytes.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address.bytes).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address.bytes).sin_port);
}

// Calls hold no thread while their answer is written.
class Probes final : public grpc::health::v1::Health::CallbackService {
 public:
  explicit Probes(HealthModel& model) : model_(model) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const HealthCheckRequest* request,
                                  HealthCheckResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(answer_check(
        request->service(), [this](const std::string& service) { return check(service); }, *response));
    return reactor;
  }

 private:
  Health check(const std::string& service) {
    const std::lock_guard lock(mutex_);
    if (steady_clock::now() >= until_) {
      table_ = model_.table();
      until_ = steady_clock::now() + kFresh;
    }
    return table_.of(service);
  }

  HealthModel& model_;
  std::mutex mutex_;
  HealthTable table_;               // guarded by mutex_
  steady_clock::time_point until_;  // likewise
};

}  // namespace

struct HealthPort::Answers {
  explicit Answers(HealthModel& model) : probes(model) {}

  Probes probes;
  std::unique_ptr<grpc::Server> server;  // declared after what it calls
};

Result<std::unique_ptr<HealthPort>> HealthPort::open(const std::string& listen, HealthModel& model) {
  Result<UniqueFd> listener = open_listener("health.listen", listen, kBacklog);
  if (!listener.ok()) return listener.status();
  Address address;
  address.size = sizeof(address.bytes);
  if (::getsockname(listener->get(), address.get(), &address.size) != 0) return errno_status("getsockname");
  Result<UniqueFd> wake = make_eventfd();
  if (!wake.ok()) return wake.status();

  auto answers = std::make_unique<Answers>(model);
  grpc::ServerBuilder builder;
  builder.RegisterService(&answers->probes);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  grpc::ResourceQuota quota("health");
  quota.Resize(kMaxMemory);
  builder.SetResourceQuota(quota);
  if (Status status = room_for_grpc_server(); !status.ok()) return status;
  answers->server = builder.BuildAndStart();
  if (answers->server == nullptr) return internal_error("gRPC could not start the server of health.listen");

  std::unique_ptr<HealthPort> port(
      new HealthPort(std::move(answers), std::move(*listener), std::move(*wake), port_of(address)));
  try {
    port->thread_ = std::thread([self = port.get()] { self->run(); });
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for health.listen: ") + error.what());
  }
  log_event(LogLevel::kInfo, "health is served", {{"listen", listen}, {"port", port->port_}});
  return port;
}

HealthPort::HealthPort(std::unique_ptr<Answers> answers, UniqueFd listener, UniqueFd wake, std::uint16_t port)
    : answers_(std::move(answers)), listener_(std::move(listener)), wake_(std::move(wake)), port_(port) {}

HealthPort::~HealthPort() {
  if (thread_.joinable()) {
    ring_eventfd(wake_.get());
    thread_.join();
  }
  answers_->server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  for (const auto& [fd, _] : connections_) ::shutdown(fd, SHUT_RDWR);
}

void HealthPort::run() {
  ::prctl(PR_SET_NAME, "epd-health");
  for (;;) {
    std::vector<pollfd> entries = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& [fd, _] : connections_)
      entries.push_back({fd, 0, 0});  // that it has ended is always told
    if (::poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) return;
    if (entries[0].revents != 0) return;
    for (std::size_t i = 2; i < entries.size(); ++i) {
      if (entries[i].revents != 0) connections_.erase(entries[i].fd);
    }
    if (entries[1].revents != 0) take_in();
  }
}

void HealthPort::take_in() {
  Address address;
  address.size = sizeof(address.bytes);
  UniqueFd fd(::accept4(listener_.get(), address.get(), &address.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) ::usleep(kPauseMs * 1000);
    return;
  }
  std::string host = host_of(address);
  if (!has_room(host)) return;
  UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return;
  const int number = copy.get();
  connections_.emplace(number, Connection{std::move(copy), std::move(host)});
  grpc::AddInsecureChannelFromFd(answers_->server.get(), fd.release());
}

bool HealthPort::has_room(const std::string& host) {
  const auto of_host =
      static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(),
                                             [&](const auto& entry) { return entry.second.host == host; }));
  if (connections_.size() < kMaxConnections && of_host < kMaxOfAddress) return true;
  static LogLimiter limiter;
  limiter.log(LogLevel::kWarning, "health connection refused",
              {{"peer", host},
               {"connections", connections_.size()},
               {"of_its_address", of_host},
               {"allowed",
                std::to_string(kMaxConnections) + ", " + std::to_string(kMaxOfAddress) + " of an address"}});
  return false;
}

}  // namespace epd::control
