#include "answers.h"
#include "epd/v1/control.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "services.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace epd::control {

// ---- health

namespace {

constexpr std::string_view kDevicePrefix = "device/";

Health serving_if(bool serving) {
  return serving ? Health::kServing : Health::kNotServing;
}

bool is_daemon(const std::string& service) {
  return service.empty() || service == "daemon";
}

bool is_control(const std::string& service) {
  return service == "control" || service == "epd.v1.Control";
}

}  // namespace

Health HealthModel::check(const std::string& service) {
  if (is_daemon(service) && !serving_.load()) return Health::kNotServing;
  const bool about_device = service.starts_with(kDevicePrefix);
  if (!is_daemon(service) && !is_control(service) && service != "membership" && service != "cluster" &&
      !about_device)
    return Health::kNoSuchService;
  Result<supervisor::HealthFacts> facts = facade_.health();
  // If the supervisor does not answer, it is not known whether the device exists.
  if (!facts.ok()) return Health::kNotServing;
  if (is_daemon(service)) return serving_if(facts->serving && facts->socket_problem.empty());
  if (service == "cluster")
    return facts->cluster_problem ? serving_if(facts->cluster_problem->empty()) : Health::kNoSuchService;
  if (!about_device) return Health::kServing;
  const auto device = facts->devices.find(service.substr(kDevicePrefix.size()));
  return device == facts->devices.end() ? Health::kNoSuchService : serving_if(device->second);
}

// ---- health service

namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// A watcher may notice a change, or the end of its client, this late.
constexpr std::chrono::milliseconds kWatchPeriod(200);

grpc::Status check_name(const std::string& service) {
  if (service.size() <= kMaxHealthName) return grpc::Status::OK;
  return {grpc::StatusCode::INVALID_ARGUMENT, "service name has " + std::to_string(service.size()) +
                                                  " bytes; allowed: 0.." + std::to_string(kMaxHealthName)};
}

HealthCheckResponse::ServingStatus to_message(Health health) {
  switch (health) {
    case Health::kServing: return HealthCheckResponse::SERVING;
    case Health::kNotServing: return HealthCheckResponse::NOT_SERVING;
    case Health::kNoSuchService: return HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return HealthCheckResponse::UNKNOWN;
}

}  // namespace

Status HealthService::authorize(const grpc::ServerContext& context) {
  Result<supervisor::Operator> by = callers_.caller_of(context);
  if (!by.ok()) return by.status();
  return facade_.authorize(*by, supervisor::Right::kRead, "ask for health");
}

grpc::Status HealthService::Check(grpc::ServerContext* context, const HealthCheckRequest* request,
                                  HealthCheckResponse* response) {
  if (Status status = authorize(*context); !status.ok()) return to_grpc(status);
  if (auto status = check_name(request->service()); !status.ok()) return status;
  const Health health = model_.check(request->service());
  if (health == Health::kNoSuchService) {
    return {grpc::StatusCode::NOT_FOUND,
            "no service '" + clean_text(request->service()) + "'; allowed: " + kHealthNames};
  }
  response->set_status(to_message(health));
  return grpc::Status::OK;
}

grpc::Status HealthService::Watch(grpc::ServerContext* context, const HealthCheckRequest* request,
                                  grpc::ServerWriter<HealthCheckResponse>* writer) {
  if (Status status = authorize(*context); !status.ok()) return to_grpc(status);
  if (auto status = check_name(request->service()); !status.ok()) return status;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {grpc::StatusCode::UNAVAILABLE, "the daemon is stopping"};
  }
  return watch(*context, request->service(), *writer);
}

grpc::Status HealthService::watch(grpc::ServerContext& context, const std::string& service,
                                  grpc::ServerWriter<HealthCheckResponse>& writer) {
  std::optional<Health> told;
  while (!context.IsCancelled()) {
    const Health health = model_.check(service);
    if (health != told) {
      HealthCheckResponse response;
      response.set_status(to_message(health));
      if (!writer.Write(response)) break;
      told = health;
    }
    if (pause()) {
      if (told != Health::kNoSuchService && told != Health::kNotServing) {
        HealthCheckResponse response;
        response.set_status(HealthCheckResponse::NOT_SERVING);
        writer.Write(response);
      }
      return {grpc::StatusCode::UNAVAILABLE, "the daemon is stopping"};
    }
  }
  return grpc::Status::CANCELLED;
}

bool HealthService::pause() {
  std::unique_lock lock(mutex_);
  return stopped_.wait_for(lock, kWatchPeriod, [this] { return stopping_; });
}

void HealthService::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  stopped_.notify_all();
}

// ---- reflection service

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

// Adds the file and its imports, each once.
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
