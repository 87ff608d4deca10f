#include "reflection_service.h"

#include "grpc_status.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <set>
#include <string>
#include "epd/v1/control.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace epd::control {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;
using Request = ReflectionService::Request;
using Response = ReflectionService::Response;

void list_services(Response& response) {
  for (const char* name : {v1::Control::service_full_name(), grpc::health::v1::Health::service_full_name(),
                           grpc::reflection::v1alpha::ServerReflection::service_full_name()}) {
    response.mutable_list_services_response()->add_service()->set_name(name);
  }
}

// With its imports, each file once.
void add_file(const FileDescriptor& file, std::set<const FileDescriptor*>& added, Response& response) {
  if (!added.insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  response.mutable_file_descriptor_response()->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) add_file(*file.dependency(i), added, response);
}

void answer_file(const FileDescriptor* file, Response& response) {
  if (file == nullptr) {
    response.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    response.mutable_error_response()->set_error_message("there is no such file or symbol");
    return;
  }
  std::set<const FileDescriptor*> added;
  add_file(*file, added, response);
}

Response answer(const Request& request) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  Response response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case Request::kListServices: list_services(response); break;
    case Request::kFileByFilename:
      answer_file(pool.FindFileByName(request.file_by_filename()), response);
      break;
    case Request::kFileContainingSymbol:
      answer_file(pool.FindFileContainingSymbol(request.file_containing_symbol()), response);
      break;
    case Request::kFileContainingExtension:
    case Request::kAllExtensionNumbersOfType:
    case Request::MESSAGE_REQUEST_NOT_SET:
      response.mutable_error_response()->set_error_code(grpc::StatusCode::UNIMPLEMENTED);
      response.mutable_error_response()->set_error_message(
          "allowed: list_services, file_by_filename, file_containing_symbol");
      break;
  }
  return response;
}

}  // namespace

grpc::Status ReflectionService::ServerReflectionInfo(grpc::ServerContext* context,
                                                     grpc::ServerReaderWriter<Response, Request>* stream) {
  Result<supervisor::Operator> by = callers_.caller_of(*context);
  if (!by.ok()) return to_grpc(by.status());
  if (Status status = facade_.authorize(*by, supervisor::Right::kRead, "ask for the API"); !status.ok())
    return to_grpc(status);
  Request request;
  while (stream->Read(&request)) {
    if (!stream->Write(answer(request))) break;
  }
  return grpc::Status::OK;
}

}  // namespace epd::control
