#include "grpc_status.h"

#include "text.h"

#include "epd/v1/control.pb.h"

namespace epd::control {
namespace {

grpc::StatusCode grpc_code(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return grpc::StatusCode::OK;
    case StatusCode::kInvalidArgument: return grpc::StatusCode::INVALID_ARGUMENT;
    case StatusCode::kDeadlineExceeded: return grpc::StatusCode::DEADLINE_EXCEEDED;
    case StatusCode::kNotFound: return grpc::StatusCode::NOT_FOUND;
    case StatusCode::kPermissionDenied: return grpc::StatusCode::PERMISSION_DENIED;
    case StatusCode::kResourceExhausted: return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case StatusCode::kVersionMismatch: return grpc::StatusCode::FAILED_PRECONDITION;
    case StatusCode::kRankLost:
    case StatusCode::kEngineRestarted:
    case StatusCode::kAborted: return grpc::StatusCode::ABORTED;
    case StatusCode::kUnsupported: return grpc::StatusCode::UNIMPLEMENTED;
    case StatusCode::kInternal: return grpc::StatusCode::INTERNAL;
    case StatusCode::kWouldBlock:
    case StatusCode::kDaemonLost: return grpc::StatusCode::UNAVAILABLE;
  }
  return grpc::StatusCode::INTERNAL;
}

}  // namespace

grpc::Status to_grpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  v1::ErrorInfo info;
  info.set_status(status_name(status.code()));
  v1::ErrorStatus error;
  error.set_code(grpc_code(status.code()));
  error.set_message(refusal_text(status.message()));
  error.add_details()->PackFrom(info);
  return {grpc_code(status.code()), error.message(), error.SerializeAsString()};
}

std::string_view code_name(grpc::StatusCode code) {
  constexpr std::string_view kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const auto index = static_cast<std::size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

}  // namespace epd::control
