// grpc.health.v1.Health over the HealthModel, for users who may read.
#pragma once

#include "caller.h"
#include "health.h"
#include "places.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include "grpc/health/v1/health.grpc.pb.h"

namespace epd::control {

// Each open Watch holds one thread of its user's server, so a user has few; one more gets RESOURCE_EXHAUSTED.
inline constexpr int kMaxWatches = 4;
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

  Result<supervisor::Operator> authorize(const grpc::ServerContext& context);

  HealthModel& model_;
  supervisor::ControlFacade& facade_;
  const Callers& callers_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;  // guarded by mutex_
  Places watches_{kMaxWatches, "open watches (Check needs none)"};
};

}  // namespace epd::control
