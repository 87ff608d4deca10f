#include "answers.h"

#include "base/utf8.h"
#include "epd/v1/control.pb.h"

#include <google/protobuf/message.h>
#include <vector>

namespace epd::control {

// ---- text

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

void clean_string(Message& message, const FieldDescriptor* field) {
  const Reflection& reflection = *message.GetReflection();
  std::string scratch;
  if (!field->is_repeated()) {
    const std::string& text = reflection.GetStringReference(message, field, &scratch);
    if (std::string clean = clean_text(text); clean != text)
      reflection.SetString(&message, field, std::move(clean));
    return;
  }
  for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
    const std::string& text = reflection.GetRepeatedStringReference(message, field, i, &scratch);
    if (std::string clean = clean_text(text); clean != text)
      reflection.SetRepeatedString(&message, field, i, std::move(clean));
  }
}

}  // namespace

std::string refusal_text(std::string_view text) {
  constexpr std::size_t kEachEnd = 400;
  if (text.size() <= 2 * kEachEnd) return clean_text(text);
  return clean_text(text.substr(0, kEachEnd)) + " ... (" + std::to_string(text.size()) + " bytes) ... " +
         clean_text(text.substr(text.size() - kEachEnd));
}

void clean_strings(Message& message) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->type() == FieldDescriptor::TYPE_STRING) clean_string(message, field);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      clean_strings(*reflection.MutableMessage(&message, field));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i)
      clean_strings(*reflection.MutableRepeatedMessage(&message, field, i));
  }
}

// ---- grpc status

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
