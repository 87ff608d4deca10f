// grpc.health.v1.Health over the HealthModel, for users who may read.
#pragma once

#include "callers.h"
#include "health.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include "grpc/health/v1/health.grpc.pb.h"

namespace epd::control {

inline constexpr std::size_t kMaxHealthName = 128;

class HealthService final : public grpc::health::v1::Health::Service {
 public:
  HealthService(HealthModel& model, supervisor::ControlFacade& facade, const Callers& callers)
      : model_(model), facade_(facade), callers_(callers) {}

  grpc::Status Check(grpc::ServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override;
  grpc::Status Watch(grpc::ServerContext* context, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::ServerWriter<grpc::health::v1::HealthCheckResponse>* writer) override;

  // Ends all watches now and refuses new ones. Any thread.
  void stop();

 private:
  grpc::Status watch(grpc::ServerContext& context, const std::string& service,
                     grpc::ServerWriter<grpc::health::v1::HealthCheckResponse>& writer);
  // True if it was stopped meanwhile.
  bool pause();

  Status authorize(const grpc::ServerContext& context);

  HealthModel& model_;
  supervisor::ControlFacade& facade_;
  const Callers& callers_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;  // guarded by mutex_
};

}  // namespace epd::control
