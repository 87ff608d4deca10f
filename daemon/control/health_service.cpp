#include "health_service.h"

#include "grpc_status.h"
#include "text.h"

#include <chrono>
#include <optional>

namespace epd::control {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// How late a watcher may notice a change, or the end of its client.
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

}  // namespace epd::control
