#include "connection.h"

#include "socket_file.h"

#include <grpcpp/grpcpp.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>
#include "epd/v1/control.grpc.pb.h"

namespace epd::ctl {
namespace {

// Who gets in, and what they may do then.
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

// gRPC says "connection refused" for everything; the file says more.
std::optional<Failure> check_socket(const std::string& path) {
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
    case SocketFile::Kind::kUsable: break;
  }
  int error = 0;
  if (accepts_streams(path, error)) return std::nullopt;
  if (error == ECONNREFUSED)
    return unreachable("UNAVAILABLE", nobody(path) + " (its socket was left behind)");
  if (error == EPROTOTYPE)
    return unreachable("UNAVAILABLE", path +
                                          " is not a control socket (perhaps the attach socket); name the " +
                                          "control socket with --socket or EPD_CONTROL_SOCKET");
  return unreachable("UNAVAILABLE", "can't connect to " + path + ": " + std::strerror(error));
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
  std::unique_ptr<v1::Control::Stub> stub;

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
        return unreachable(name, "the daemon at " + socket + " has not answered within " +
                                     std::to_string(timeout_ms) + " ms; raise --timeout-ms or see its log");
      case grpc::StatusCode::UNAVAILABLE:
        return unreachable(name, "lost the daemon at " + socket + ": " + status.error_message());
      case grpc::StatusCode::UNIMPLEMENTED:
        return {Exit::kRefused, name,
                "the daemon at " + socket + " does not know this call; compare with: epctl version"};
      default: return {Exit::kRefused, name, status.error_message()};
    }
  }

  template <typename Request, typename Response>
  std::optional<Failure> run(grpc::Status (v1::Control::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                       Response*),
                             const Request& request, Response& response) {
    if (auto failure = check_socket(socket)) return failure;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    const grpc::Status status = (stub.get()->*method)(&context, request, &response);
    if (status.ok()) return std::nullopt;
    return explain(status);
  }
};

Connection::Connection(const std::string& socket, std::uint32_t timeout_ms)
    : impl_(std::make_unique<Impl>(Impl{socket, timeout_ms, nullptr})) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxResponseBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  impl_->stub = v1::Control::NewStub(
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments));
}

Connection::~Connection() = default;

std::optional<Failure> Connection::call(const v1::GetStatusRequest& request,
                                        v1::GetStatusResponse& response) {
  return impl_->run(&v1::Control::Stub::GetStatus, request, response);
}
std::optional<Failure> Connection::call(const v1::ListDevicesRequest& request,
                                        v1::ListDevicesResponse& response) {
  return impl_->run(&v1::Control::Stub::ListDevices, request, response);
}
std::optional<Failure> Connection::call(const v1::ListSessionsRequest& request,
                                        v1::ListSessionsResponse& response) {
  return impl_->run(&v1::Control::Stub::ListSessions, request, response);
}
std::optional<Failure> Connection::call(const v1::ListGroupsRequest& request,
                                        v1::ListGroupsResponse& response) {
  return impl_->run(&v1::Control::Stub::ListGroups, request, response);
}
std::optional<Failure> Connection::call(const v1::ListOperationsRequest& request,
                                        v1::ListOperationsResponse& response) {
  return impl_->run(&v1::Control::Stub::ListOperations, request, response);
}
std::optional<Failure> Connection::call(const v1::GetConfigRequest& request,
                                        v1::GetConfigResponse& response) {
  return impl_->run(&v1::Control::Stub::GetConfig, request, response);
}
std::optional<Failure> Connection::call(const v1::DrainRequest& request, v1::DrainResponse& response) {
  return impl_->run(&v1::Control::Stub::Drain, request, response);
}
std::optional<Failure> Connection::call(const v1::GetVersionRequest& request,
                                        v1::GetVersionResponse& response) {
  return impl_->run(&v1::Control::Stub::GetVersion, request, response);
}

std::optional<Failure> Connection::call(const v1::GetOperationRequest& request,
                                        v1::GetOperationResponse& response) {
  return impl_->run(&v1::Control::Stub::GetOperation, request, response);
}
std::optional<Failure> Connection::call(const v1::GetStatisticsRequest& request,
                                        v1::GetStatisticsResponse& response) {
  return impl_->run(&v1::Control::Stub::GetStatistics, request, response);
}
std::optional<Failure> Connection::call(const v1::SetDeviceRequest& request,
                                        v1::SetDeviceResponse& response) {
  return impl_->run(&v1::Control::Stub::SetDevice, request, response);
}
std::optional<Failure> Connection::call(const v1::SetGroupRequest& request, v1::SetGroupResponse& response) {
  return impl_->run(&v1::Control::Stub::SetGroup, request, response);
}
std::optional<Failure> Connection::call(const v1::EvictSessionRequest& request,
                                        v1::EvictSessionResponse& response) {
  return impl_->run(&v1::Control::Stub::EvictSession, request, response);
}
std::optional<Failure> Connection::call(const v1::EvictRankRequest& request,
                                        v1::EvictRankResponse& response) {
  return impl_->run(&v1::Control::Stub::EvictRank, request, response);
}

std::optional<Failure> Connection::call(const v1::RestartDeviceRequest& request,
                                        v1::RestartDeviceResponse& response) {
  return impl_->run(&v1::Control::Stub::RestartDevice, request, response);
}

std::optional<Failure> Connection::watch(const v1::WatchEventsRequest& request,
                                         const std::function<bool(const v1::WatchEventsResponse&)>& each) {
  if (auto failure = check_socket(impl_->socket)) return failure;
  grpc::ClientContext context;
  if (!request.follow()) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(impl_->timeout_ms));
  }
  const auto reader = impl_->stub->WatchEvents(&context, request);
  v1::WatchEventsResponse response;
  while (reader->Read(&response)) {
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
