#include "connection.h"

#include "socket_file.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>
#include "epd/v1/control.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace epd::ctl {
namespace {

using grpc::health::v1::Health;
using std::chrono::steady_clock;
using std::chrono::system_clock;

// Who may connect, and what they may do then.
constexpr const char* kControlKeys =
    "daemon.control_socket_group with daemon.control_socket_mode = \"0660\", and access.operate";
constexpr int kMaxResponseBytes = 256 << 20;

Failure unreachable(const char* status, std::string message) {
  return {Exit::kUnreachable, status, std::move(message)};
}

std::string nobody(const std::string& path) {
  return "no daemon listens at " + path + ": is epd running? Start it, or name its socket with --socket " +
         "or EPD_CONTROL_SOCKET";
}

// Why connect() failed; its file says more than the errno.
Failure explain_connect(const std::string& path, int error, std::uint32_t timeout_ms) {
  const SocketFile file = look_at_socket(path);
  switch (file.kind) {
    case SocketFile::Kind::kMissing: return unreachable("UNAVAILABLE", nobody(path));
    case SocketFile::Kind::kUnseen:
      return unreachable("PERMISSION_DENIED", "can't look at " + path + ": " + file.error + "; use sudo");
    case SocketFile::Kind::kOther:
      return unreachable("UNAVAILABLE", path + " is no socket; name the daemon's control socket with " +
                                            "--socket or EPD_CONTROL_SOCKET");
    case SocketFile::Kind::kForbidden:
      return unreachable("PERMISSION_DENIED", "may not open " + path + " (" + owner_and_mode(file) + "); " +
                                                  how_to_get_in(file, kControlKeys));
    case SocketFile::Kind::kStale:
    case SocketFile::Kind::kUsable: break;
  }
  if (error == ECONNREFUSED)
    return unreachable("UNAVAILABLE", nobody(path) + " (its socket was left behind)");
  if (error == EPROTOTYPE)
    return unreachable("UNAVAILABLE", path +
                                          " is not a control socket (perhaps the attach socket); name the " +
                                          "control socket with --socket or EPD_CONTROL_SOCKET");
  if (error == EAGAIN)
    return unreachable("DEADLINE_EXCEEDED",
                       "the daemon at " + path + " has taken no connection within " +
                           std::to_string(timeout_ms) +
                           " ms, so many wait before this one; raise --timeout-ms or see its log");
  return unreachable("UNAVAILABLE", "can't connect to " + path + ": " + std::strerror(error));
}

// gRPC's deadlines are the system clock's.
system_clock::time_point on_system_clock(steady_clock::time_point time) {
  return system_clock::now() + std::chrono::duration_cast<system_clock::duration>(time - steady_clock::now());
}

std::shared_ptr<grpc::Channel> channel_over(Descriptor fd) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxResponseBytes);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  return grpc::CreateCustomInsecureChannelFromFd("control", fd.release(), arguments);
}

const char* code_name(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK: return "OK";
    case grpc::StatusCode::CANCELLED: return "CANCELLED";
    case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND: return "NOT_FOUND";
    case grpc::StatusCode::ALREADY_EXISTS: return "ALREADY_EXISTS";
    case grpc::StatusCode::PERMISSION_DENIED: return "PERMISSION_DENIED";
    case grpc::StatusCode::UNAUTHENTICATED: return "UNAUTHENTICATED";
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::FAILED_PRECONDITION: return "FAILED_PRECONDITION";
    case grpc::StatusCode::ABORTED: return "ABORTED";
    case grpc::StatusCode::OUT_OF_RANGE: return "OUT_OF_RANGE";
    case grpc::StatusCode::UNIMPLEMENTED: return "UNIMPLEMENTED";
    case grpc::StatusCode::INTERNAL: return "INTERNAL";
    case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
    case grpc::StatusCode::DATA_LOSS: return "DATA_LOSS";
    default: return "UNKNOWN";
  }
}

// epd's own name of the status; empty if the daemon's code did not send this error.
std::string daemon_status(const grpc::Status& status) {
  v1::ErrorStatus error;
  v1::ErrorInfo info;
  if (!error.ParseFromString(status.error_details())) return {};
  for (const auto& detail : error.details())
    if (detail.UnpackTo(&info)) return info.status();
  return {};
}

}  // namespace

struct Connection::Impl {
  std::string socket;
  std::uint32_t timeout_ms = 0;
  std::unique_ptr<v1::Control::Stub> stub;  // null: not connected
  std::unique_ptr<Health::Stub> health;     // likewise
  Descriptor watched = Descriptor();        // the connection's too: gRPC does not tell that it has ended
  bool answered = false;                    // over this connection

  // Of a call that begins now, connecting included.
  steady_clock::time_point deadline() const {
    return steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  }

  void disconnect() {
    stub.reset();
    health.reset();
    watched.reset();
    answered = false;
  }

  // One connection for all calls, and another one once the daemon has ended it: it ends those that are idle.
  std::optional<Failure> connect(steady_clock::time_point deadline) {
    if (stub && !has_ended(watched)) return std::nullopt;
    disconnect();
    Dialled dialled = dial(socket, deadline);
    if (dialled.error != 0) return explain_connect(socket, dialled.error, timeout_ms);
    const int fd = dialled.fd.get();
    watched.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (watched.get() < 0 || ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
      return unreachable("UNAVAILABLE",
                         "can't use the connection to " + socket + ": " + std::strerror(errno));
    const auto channel = channel_over(std::move(dialled.fd));
    stub = v1::Control::NewStub(channel);
    health = Health::NewStub(channel);
    return std::nullopt;
  }

  Failure explain(const grpc::Status& status) const {
    if (std::string name = daemon_status(status); !name.empty()) {
      std::string text = status.error_message();
      if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED)
        text += " (as root, or as the daemon's user, everything is allowed)";
      return {Exit::kRefused, name, std::move(text)};
    }
    const char* name = code_name(status.error_code());
    switch (status.error_code()) {
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        if (const std::int32_t pid = stopped_listener(watched); pid != 0)
          return unreachable(name, "the daemon at " + socket + " (pid " + std::to_string(pid) +
                                       ") is stopped by a signal or a debugger: kill -CONT " +
                                       std::to_string(pid));
        return unreachable(name, "the daemon at " + socket + " has not answered within " +
                                     std::to_string(timeout_ms) + " ms; raise --timeout-ms or see its log");
      case grpc::StatusCode::UNAVAILABLE:
        return unreachable(name, "lost the daemon at " + socket + ": " + status.error_message() +
                                     (answered ? "" : "; perhaps it has too many connections: see its log"));
      case grpc::StatusCode::UNIMPLEMENTED:
        return {Exit::kRefused, name,
                "the daemon at " + socket + " does not know this call; compare with: epctl version"};
      // gRPC itself gives these: the daemon's own refusals carry ErrorInfo.
      case grpc::StatusCode::RESOURCE_EXHAUSTED:
        if (status.error_message().find("larger than max") != std::string::npos)
          return {Exit::kRefused, name,
                  "gRPC refused the message: " + status.error_message() + "; is an argument very long?"};
        return unreachable(name, "the daemon at " + socket + " lacks threads or memory for the call: " +
                                     status.error_message() + "; see its log and its limits");
      case grpc::StatusCode::CANCELLED:
      case grpc::StatusCode::UNKNOWN:
      case grpc::StatusCode::INTERNAL:
        return unreachable(name, "the call to " + socket + " was ended: " + status.error_message() +
                                     "; perhaps the daemon stops, or another program listens there");
      default: return {Exit::kRefused, name, status.error_message()};
    }
  }

  template <typename Stub, typename Request, typename Response>
  using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Response*);

  v1::Control::Stub& of(v1::Control::Stub* /*which*/) { return *stub; }
  Health::Stub& of(Health::Stub* /*which*/) { return *health; }

  template <typename Stub, typename Request, typename Response>
  std::optional<Failure> run(Method<Stub, Request, Response> method, const Request& request,
                             Response& response, steady_clock::time_point deadline) {
    if (auto failure = connect(deadline)) return failure;
    grpc::ClientContext context;
    context.set_deadline(on_system_clock(deadline));
    const grpc::Status status = (of(static_cast<Stub*>(nullptr)).*method)(&context, request, &response);
    std::optional<Failure> failure;
    if (!status.ok()) failure = explain(status);
    answered = answered || status.ok() || !daemon_status(status).empty();
    return failure;
  }

  template <typename Stub, typename Request, typename Response>
  std::optional<Failure> change(Method<Stub, Request, Response> method, const Request& request,
                                Response& response) {
    return run(method, request, response, deadline());
  }

  // Calls that change nothing are repeated over a new connection if the daemon ended an idle one just as the
  // call began.
  template <typename Stub, typename Request, typename Response>
  std::optional<Failure> ask(Method<Stub, Request, Response> method, const Request& request,
                             Response& response) {
    const auto until = deadline();
    const bool used = answered;
    const auto failure = run(method, request, response, until);
    const bool lost = failure && failure->exit == Exit::kUnreachable && failure->status == "UNAVAILABLE";
    if (!lost || !used || !answered) return failure;  // the connection was a new one
    disconnect();
    return run(method, request, response, until);
  }
};

Connection::Connection(const std::string& socket, std::uint32_t timeout_ms)
    : impl_(std::make_unique<Impl>(Impl{socket, timeout_ms, nullptr, nullptr})) {}

Connection::~Connection() = default;

std::optional<Failure> Connection::call(const v1::GetStatusRequest& request,
                                        v1::GetStatusResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetStatus, request, response);
}
std::optional<Failure> Connection::call(const v1::ListDevicesRequest& request,
                                        v1::ListDevicesResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListDevices, request, response);
}
std::optional<Failure> Connection::call(const v1::ListNodesRequest& request,
                                        v1::ListNodesResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListNodes, request, response);
}
std::optional<Failure> Connection::call(const v1::ListFarEnginesRequest& request,
                                        v1::ListFarEnginesResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListFarEngines, request, response);
}
std::optional<Failure> Connection::call(const v1::ListSessionsRequest& request,
                                        v1::ListSessionsResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListSessions, request, response);
}
std::optional<Failure> Connection::call(const v1::ListGroupsRequest& request,
                                        v1::ListGroupsResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListGroups, request, response);
}
std::optional<Failure> Connection::call(const v1::ListOperationsRequest& request,
                                        v1::ListOperationsResponse& response) {
  return impl_->ask(&v1::Control::Stub::ListOperations, request, response);
}
std::optional<Failure> Connection::call(const v1::GetConfigRequest& request,
                                        v1::GetConfigResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetConfig, request, response);
}
std::optional<Failure> Connection::call(const v1::DrainRequest& request, v1::DrainResponse& response) {
  return impl_->change(&v1::Control::Stub::Drain, request, response);
}
std::optional<Failure> Connection::call(const v1::GetVersionRequest& request,
                                        v1::GetVersionResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetVersion, request, response);
}

std::optional<Failure> Connection::call(const v1::GetOperationRequest& request,
                                        v1::GetOperationResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetOperation, request, response);
}
std::optional<Failure> Connection::call(const v1::GetStatisticsRequest& request,
                                        v1::GetStatisticsResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetStatistics, request, response);
}
std::optional<Failure> Connection::call(const v1::GetWaitsRequest& request, v1::GetWaitsResponse& response) {
  return impl_->ask(&v1::Control::Stub::GetWaits, request, response);
}
std::optional<Failure> Connection::call(const v1::ReloadConfigRequest& request,
                                        v1::ReloadConfigResponse& response) {
  return impl_->change(&v1::Control::Stub::ReloadConfig, request, response);
}
std::optional<Failure> Connection::call(const v1::SetOptionsRequest& request,
                                        v1::SetOptionsResponse& response) {
  return impl_->change(&v1::Control::Stub::SetOptions, request, response);
}
Descriptor Connection::process(std::int32_t own_pid) const {
  return listening_process(impl_->watched, own_pid);
}
std::optional<Failure> Connection::check_health(const std::string& service, bool& serving) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  auto failure = impl_->ask(&Health::Stub::Check, request, response);
  serving = !failure && response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  return failure;
}
std::optional<Failure> Connection::call(const v1::SetDeviceRequest& request,
                                        v1::SetDeviceResponse& response) {
  return impl_->change(&v1::Control::Stub::SetDevice, request, response);
}
std::optional<Failure> Connection::call(const v1::SetGroupRequest& request, v1::SetGroupResponse& response) {
  return impl_->change(&v1::Control::Stub::SetGroup, request, response);
}
std::optional<Failure> Connection::call(const v1::EvictSessionRequest& request,
                                        v1::EvictSessionResponse& response) {
  return impl_->change(&v1::Control::Stub::EvictSession, request, response);
}
std::optional<Failure> Connection::call(const v1::EvictRankRequest& request,
                                        v1::EvictRankResponse& response) {
  return impl_->change(&v1::Control::Stub::EvictRank, request, response);
}

std::optional<Failure> Connection::call(const v1::RestartDeviceRequest& request,
                                        v1::RestartDeviceResponse& response) {
  return impl_->change(&v1::Control::Stub::RestartDevice, request, response);
}

std::optional<Failure> Connection::watch(const v1::WatchEventsRequest& request,
                                         const std::function<bool(const v1::WatchEventsResponse&)>& each) {
  const auto deadline = impl_->deadline();
  if (auto failure = impl_->connect(deadline)) return failure;
  grpc::ClientContext context;
  if (!request.follow()) context.set_deadline(on_system_clock(deadline));
  const auto reader = impl_->stub->WatchEvents(&context, request);
  v1::WatchEventsResponse response;
  while (reader->Read(&response)) {
    impl_->answered = true;
    if (each(response)) continue;
    context.TryCancel();
    (void)reader->Finish();
    return std::nullopt;
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) return std::nullopt;
  return impl_->explain(status);
}

std::string grpc_version() {
  return grpc::Version();
}

}  // namespace epd::ctl
