#include "connection.h"

#include "socket.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <utility>
#include "epd/v1/control.grpc.pb.h"
#include "grpc/health/v1/health.pb.h"

namespace epd::ctl {
namespace {

using google::protobuf::Message;
using std::chrono::milliseconds;
using Deadline = std::chrono::system_clock::time_point;  // as gRPC has them

// The options that let other users connect, and let them change the daemon.
constexpr const char* kControlKeys =
    "daemon.control_socket_group with daemon.control_socket_mode = \"0660\", and access.operate";
constexpr int kMaxResponseBytes = 256 << 20;
constexpr int kAgainMs = 100;  // between two tries to connect

Failure unreachable(const char* status, std::string message) {
  return {Exit::kUnreachable, status, std::move(message)};
}

std::string nobody(const std::string& path) {
  return "no daemon listens at " + path + ": is epd running? Start it, or name its socket with --socket " +
         "or EPD_CONTROL_SOCKET";
}

// Why connect() failed; its file says more than the errno.
Failure explain_connect(const std::string& path, int error) {
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
  return unreachable("UNAVAILABLE", "can't connect to " + path + ": " + std::strerror(error));
}

// Encodes a path for a URI.
std::string encoded(const std::string& path) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || std::strchr("/-._~", c) != nullptr) {
      out += c;
    } else {
      out += {'%', kHex[byte >> 4], kHex[byte & 0xfu]};
    }
  }
  return out;
}

std::shared_ptr<grpc::Channel> make_channel(const std::string& socket, std::uint32_t timeout_ms) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxResponseBytes);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  // A daemon that says nothing is waited for until the call's deadline.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(timeout_ms) + kAgainMs);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kAgainMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kAgainMs);
  return grpc::CreateCustomChannel("unix:" + encoded(socket), grpc::InsecureChannelCredentials(), arguments);
}

const char* code_name(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return static_cast<std::size_t>(code) < std::size(kNames) ? kNames[code] : "UNKNOWN";
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

// The method that takes such a request, of a service beside it: "/epd.v1.Control/GetStatus".
std::string method_of(const Message& request) {
  const auto& file = *request.GetDescriptor()->file();
  for (int s = 0; s < file.service_count(); ++s) {
    const auto& service = *file.service(s);
    for (int m = 0; m < service.method_count(); ++m) {
      if (service.method(m)->input_type() == request.GetDescriptor())
        return "/" + service.full_name() + "/" + service.method(m)->name();
    }
  }
  std::abort();  // no request
}

}  // namespace

struct Connection::Impl {
  std::string socket;
  std::uint32_t timeout_ms = 0;
  std::shared_ptr<grpc::Channel> channel;
  bool answered = false;

  Deadline deadline() const { return std::chrono::system_clock::now() + milliseconds(timeout_ms); }

  // The channel connects by itself, and again once the daemon has ended an idle connection. It reports every
  // failure to connect alike, so the socket is looked at.
  std::optional<Failure> connect(Deadline deadline) const {
    bool ended = false;  // a connection was taken, and ended before it was of use
    for (;;) {
      const grpc_connectivity_state state = channel->GetState(true);
      if (state == GRPC_CHANNEL_READY) return std::nullopt;
      // After a failure gRPC tries again, and its state stays the same while it fails.
      const bool failed = state == GRPC_CHANNEL_TRANSIENT_FAILURE;
      if (failed) {
        const int error = knock(socket).error;
        if (error != 0 && error != EAGAIN) return explain_connect(socket, error);
        if (error == 0 && ended) return ended_early("it ends connections at once");
        ended = error == 0;
      }
      const Deadline next = std::chrono::system_clock::now() + milliseconds(3 * kAgainMs);
      const bool changed = channel->WaitForStateChange(state, failed ? std::min(deadline, next) : deadline);
      if (!changed && std::chrono::system_clock::now() >= deadline) return explain_silence();
    }
  }

  Failure ended_early(const std::string& why) const {
    return unreachable("UNAVAILABLE", "lost the daemon at " + socket + ": " + why +
                                          "; perhaps it has too many connections: see its log. Or another " +
                                          "program listens there");
  }

  Failure explain_silence() const {
    const Knock now = knock(socket);
    const std::string within = " within " + std::to_string(timeout_ms) + " ms";
    if (now.error == EAGAIN)
      return unreachable("DEADLINE_EXCEEDED",
                         "the daemon at " + socket + " has taken no connection" + within +
                             ", so many wait before this one; raise --timeout-ms or see its log");
    const std::string pid = std::to_string(now.listener);
    if (is_stopped(now.listener))
      return unreachable("DEADLINE_EXCEEDED", "the daemon at " + socket + " (pid " + pid +
                                                  ") is stopped by a signal or a debugger: kill -CONT " +
                                                  pid);
    return unreachable("DEADLINE_EXCEEDED", "the daemon at " + socket + " has not answered" + within +
                                                "; raise --timeout-ms or see its log");
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
      case grpc::StatusCode::DEADLINE_EXCEEDED: return explain_silence();
      case grpc::StatusCode::UNAVAILABLE:
        if (!answered) return ended_early(status.error_message());
        return unreachable(name, "lost the daemon at " + socket + ": " + status.error_message());
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
};

Connection::Connection(const std::string& socket, std::uint32_t timeout_ms)
    : impl_(std::make_unique<Impl>(Impl{socket, timeout_ms, make_channel(socket, timeout_ms)})) {}

Connection::~Connection() = default;

// A call that changes nothing is repeated if the daemon ended an idle connection just as the call began.
std::optional<Failure> Connection::try_call(const Message& request, Message& response) {
  const Deadline deadline = impl_->deadline();
  const std::string method = method_of(request);
  const bool reads = method.find("/Get") != std::string::npos || method.find("/List") != std::string::npos;
  for (bool again = reads && impl_->answered;; again = false) {
    if (auto failure = impl_->connect(deadline)) return failure;
    grpc::ClientContext context;
    context.set_deadline(deadline);
    grpc::TemplatedGenericStub<Message, Message> stub(impl_->channel);
    std::promise<grpc::Status> ended;
    stub.UnaryCall(&context, method, {}, &request, &response,
                   [&](const grpc::Status& status) { ended.set_value(status); });
    const grpc::Status status = ended.get_future().get();
    const bool said = status.ok() || !daemon_status(status).empty();
    if (again && !said && status.error_code() == grpc::StatusCode::UNAVAILABLE) continue;
    std::optional<Failure> failure;
    if (!status.ok()) failure = impl_->explain(status);
    impl_->answered = impl_->answered || said;
    return failure;
  }
}

bool Connection::is_serving(const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  return call<grpc::health::v1::HealthCheckResponse>(request).status() ==
         grpc::health::v1::HealthCheckResponse::SERVING;
}

void Connection::watch(const v1::WatchEventsRequest& request,
                       const std::function<bool(const v1::WatchEventsResponse&)>& each) {
  const Deadline deadline = impl_->deadline();
  if (auto failure = impl_->connect(deadline)) throw std::move(*failure);
  grpc::ClientContext context;
  if (!request.follow()) context.set_deadline(deadline);
  const auto reader = v1::Control::NewStub(impl_->channel)->WatchEvents(&context, request);
  v1::WatchEventsResponse response;
  while (reader->Read(&response)) {
    impl_->answered = true;
    if (each(response)) continue;
    context.TryCancel();
    (void)reader->Finish();
    return;
  }
  if (const grpc::Status status = reader->Finish(); !status.ok()) throw impl_->explain(status);
}

std::string grpc_version() {
  return grpc::Version();
}

}  // namespace epd::ctl
