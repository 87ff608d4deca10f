#include "control/control_server.h"

#include "base/log.h"
#include "control_service.h"
#include "health_service.h"
#include "socket.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
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

std::unique_ptr<grpc::Server> build(const std::string& socket_path, grpc::Service& control,
                                    grpc::Service& health, int& port) {
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials(), &port);
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
      : model(facade), health(model), control(make_control_service(facade, stopping)) {}

  std::atomic<bool> stopping{false};
  HealthModel model;
  HealthService health;
  std::unique_ptr<grpc::Service> control;
  std::unique_ptr<grpc::Server> server;  // after what it calls
};

ControlServer::ControlServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ControlServer::~ControlServer() {
  shutdown();
}

Result<std::unique_ptr<ControlServer>> ControlServer::start(ControlFacade& facade,
                                                            const ControlOptions& options) {
  if (Status status = check_socket_options(options); !status.ok()) return status;
  auto group = find_group(options.group);
  if (!group.ok()) return group.status();
  if (Status status = clear_socket_path(options.socket_path); !status.ok()) return status;

  gpr_set_log_function(forward_log);
  auto impl = std::make_unique<Impl>(facade);
  int port = 0;
  {
    const PrivateUmask umask;
    impl->server = build(options.socket_path, *impl->control, impl->health, port);
  }
  if (impl->server == nullptr || port == 0) {
    return Status{StatusCode::kPermissionDenied,
                  "can't listen on the control socket " + options.socket_path +
                      ": gRPC could not bind it (see its line in the log); allowed: a path in a directory " +
                      "that the daemon may write"};
  }
  std::unique_ptr<ControlServer> server(new ControlServer(std::move(impl)));
  if (Status status = restrict_socket(options, *group); !status.ok()) return status;
  return server;
}

void ControlServer::set_serving(bool serving) {
  impl_->model.set_serving(serving);
}

void ControlServer::shutdown() {
  if (impl_->server == nullptr) return;
  impl_->stopping.store(true);
  impl_->health.stop();
  impl_->server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  impl_->server.reset();
}

}  // namespace epd
