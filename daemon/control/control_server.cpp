#include "control/control_server.h"

#include "acceptor.h"
#include "base/log.h"
#include "control_service.h"
#include "health_service.h"
#include "socket.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <atomic>
#include <chrono>
#include <utility>

namespace epd {
namespace {

// A handful of operators and probes, never a data path: few threads, little memory.
constexpr int kMaxThreads = 16;
constexpr int kMaxMemory = 32 << 20;
constexpr int kMaxRequestBytes = 64 << 10;
constexpr int kMaxStreams = 16;  // for each connection
constexpr int kIdleConnectionMs = 10 * 60 * 1000;
constexpr std::chrono::milliseconds kShutdownGrace(500);

// gRPC's own lines go where ours go, in our format.
void forward_log(gpr_log_func_args* line) {
  static LogLimiter limiter;
  const LogLevel level = line->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : line->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                   : LogLevel::kDebug;
  limiter.log(level, "grpc", {{"text", line->message}, {"file", line->file}, {"line", line->line}});
}

std::unique_ptr<grpc::Server> build(grpc::Service& control, grpc::Service& health) {
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.RegisterService(&control);
  builder.RegisterService(&health);
  using Option = grpc::ServerBuilder::SyncServerOption;
  builder.SetSyncServerOption(Option::NUM_CQS, 1);
  builder.SetSyncServerOption(Option::MIN_POLLERS, 1);
  builder.SetSyncServerOption(Option::MAX_POLLERS, 2);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  grpc::ResourceQuota quota("control");
  quota.SetMaxThreads(kMaxThreads);
  quota.Resize(kMaxMemory);
  builder.SetResourceQuota(quota);
  return builder.BuildAndStart();
}

}  // namespace

struct ControlServer::Impl {
  explicit Impl(ControlFacade& facade)
      : model(facade),
        health(model, facade, callers),
        control(make_control_service(facade, callers, stopping)) {}

  std::atomic<bool> stopping{false};
  Callers callers;
  HealthModel model;
  HealthService health;
  std::unique_ptr<grpc::Service> control;
  // After what they call. The threads of one are for root and the daemon's own user alone: what others do to
  // theirs keeps no operator out.
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<grpc::Server> privileged;
  std::unique_ptr<Acceptor> acceptor;  // after what it feeds
};

ControlServer::ControlServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ControlServer::~ControlServer() {
  shutdown();
}

Result<std::unique_ptr<ControlServer>> ControlServer::start(ControlFacade& facade,
                                                            const ControlOptions& options) {
  if (Status status = check_socket_options(options); !status.ok()) return status;
  if (Status status = clear_socket_path(options.socket_path); !status.ok()) return status;

  gpr_set_log_function(forward_log);
  auto impl = std::make_unique<Impl>(facade);
  impl->server = build(*impl->control, impl->health);
  impl->privileged = build(*impl->control, impl->health);
  if (impl->server == nullptr || impl->privileged == nullptr)
    return internal_error("gRPC could not start its server; see its line in the log");
  Result<UniqueFd> listener = listen_on(options);
  if (!listener.ok()) return listener.status();
  grpc::Server* servers[2] = {impl->server.get(), impl->privileged.get()};
  Result<std::unique_ptr<Acceptor>> acceptor = Acceptor::start(
      std::move(*listener), options.socket_path, impl->callers, [servers](int fd, bool privileged) {
        grpc::AddInsecureChannelFromFd(servers[privileged ? 1 : 0], fd);
      });
  if (!acceptor.ok()) return acceptor.status();
  impl->acceptor = std::move(*acceptor);
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(impl)));
}

void ControlServer::set_serving(bool serving) {
  impl_->model.set_serving(serving);
}

void ControlServer::shutdown() {
  if (impl_->server == nullptr) return;
  impl_->acceptor->stop_accepting();
  impl_->stopping.store(true);
  impl_->health.stop();
  const auto deadline = std::chrono::system_clock::now() + kShutdownGrace;
  impl_->server->Shutdown(deadline);
  impl_->privileged->Shutdown(deadline);
  impl_->server.reset();
  impl_->privileged.reset();
  impl_->acceptor->stop();
}

}  // namespace epd
