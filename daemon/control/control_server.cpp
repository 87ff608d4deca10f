#include "control/control_server.h"

#include "base/log.h"
#include "base/thread.h"
#include "connections.h"
#include "services.h"

#include <grpc/support/log.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <atomic>
#include <chrono>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace epd::control {
namespace {

// The server is for operators and probes, not for data. A call holds a thread until its client has read the
// answer. gRPC counts a thread that could not be started for ever.
constexpr int kMaxThreads = 256;
constexpr int kMaxMemory = 64 << 20;
constexpr int kMaxRequestBytes = 64 << 10;
constexpr int kMaxStreams = 16;  // for each connection
constexpr int kIdleConnectionMs = 10 * 60 * 1000;
constexpr int kKeepaliveMs = 60 * 1000;  // while there are calls: a client that is stopped is let go
constexpr std::chrono::milliseconds kShutdownGrace(500);

// Only the cluster uses TLS. Both ends report failures there themselves: "no coordinator", "node refused".
bool is_told_elsewhere(const gpr_log_func_args& line) {
  return std::string_view(line.file).find("ssl_transport_security") != std::string_view::npos;
}

// gRPC's log lines go to our log, in our format.
void forward_log(gpr_log_func_args* line) {
  static LogLimiter limiter;
  const LogLevel level = is_told_elsewhere(*line)                   ? LogLevel::kDebug
                         : line->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning
                         : line->severity == GPR_LOG_SEVERITY_INFO  ? LogLevel::kInfo
                                                                    : LogLevel::kDebug;
  limiter.log(level, "grpc", {{"text", line->message}, {"file", line->file}, {"line", line->line}});
}

std::unique_ptr<grpc::Server> build(std::initializer_list<grpc::Service*> services) {
  grpc::ServerBuilder builder;
  for (grpc::Service* service : services) builder.RegisterService(service);
  using Option = grpc::ServerBuilder::SyncServerOption;
  builder.SetSyncServerOption(Option::NUM_CQS, 1);
  builder.SetSyncServerOption(Option::MIN_POLLERS, 1);
  builder.SetSyncServerOption(Option::MAX_POLLERS, 2);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);  // 40 kB would become 40 MB
  grpc::ResourceQuota quota("control");
  quota.SetMaxThreads(kMaxThreads);
  quota.Resize(kMaxMemory);
  builder.SetResourceQuota(quota);
  return builder.BuildAndStart();
}

}  // namespace

struct ControlServer::Impl {
  explicit Impl(supervisor::ControlFacade& facade)
      : model(facade),
        health(model, facade, callers),
        control(make_control_service(facade, callers, stopping, times)),
        reflection(facade, callers) {}

  std::atomic<bool> stopping{false};
  CallTimes times;
  Callers callers;
  HealthModel model;
  HealthService health;
  std::unique_ptr<grpc::Service> control;
  ReflectionService reflection;
  std::unique_ptr<grpc::Server> server;  // declared after the objects that it calls
  std::unique_ptr<Acceptor> acceptor;    // declared after the server that it feeds
};

ControlServer::ControlServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ControlServer::~ControlServer() {
  shutdown();
}

Result<std::unique_ptr<ControlServer>> ControlServer::start(supervisor::ControlFacade& facade,
                                                            const ControlOptions& options) {
  if (Status status = check_socket_options(options); !status.ok()) return status;
  if (Status status = clear_socket_path(options.socket_path); !status.ok()) return status;

  gpr_set_log_function(forward_log);
  auto impl = std::make_unique<Impl>(facade);
  if (Status status = room_for_grpc_server(); !status.ok()) return status;
  impl->server = build({impl->control.get(), &impl->health, &impl->reflection});
  if (impl->server == nullptr)
    return internal_error("gRPC could not start its server; see its line in the log");
  Result<UniqueFd> listener = listen_on(options);
  if (!listener.ok()) return listener.status();
  Result<std::unique_ptr<Acceptor>> acceptor =
      Acceptor::start(std::move(*listener), options.socket_path, impl->callers,
                      [server = impl->server.get()](int fd) { grpc::AddInsecureChannelFromFd(server, fd); });
  if (!acceptor.ok()) return acceptor.status();
  impl->acceptor = std::move(*acceptor);
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(impl)));
}

void ControlServer::set_serving(bool serving) {
  impl_->model.set_serving(serving);
}

const CallTimes& ControlServer::times() const {
  return impl_->times;
}

bool ControlServer::healthy(const std::string& service) const {
  return impl_->model.check(service) == Health::kServing;
}

void ControlServer::shutdown() {
  if (impl_->stopping.exchange(true)) return;
  impl_->acceptor->stop();
  impl_->health.stop();
  impl_->server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
}

}  // namespace epd::control
