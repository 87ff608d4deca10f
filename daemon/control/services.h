// The services on the control socket.
#pragma once

#include "base/call_times.h"
#include "connections.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "supervisor/control_facade.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace epd::control {

// epd.v1.Control over the supervisor's facade. All arguments outlive it. Watches end when `stopping` is set.
std::unique_ptr<grpc::Service> make_control_service(supervisor::ControlFacade& facade, const Callers& callers,
                                                    const std::atomic<bool>& stopping, CallTimes& times);

// The names of grpc.health.v1, and when each is SERVING. Computed from the facade when asked.
//   "daemon", ""                  the daemon serves and admits clients
//   "control", "epd.v1.Control"   the supervisor's loop answers
//   "membership"                  the same: the loop knows the groups
//   "device/<name>"               that device is ready; its name as in ListDevices
//   "cluster"                     the coordinator answers, or this node is the coordinator; only in a cluster

// The allowed names, for refusals.
inline constexpr const char* kHealthNames =
    "daemon (or ''), control (or epd.v1.Control), membership, device/NAME; with a cluster also cluster";

enum class Health { kServing, kNotServing, kNoSuchService };

class HealthModel {
 public:
  explicit HealthModel(supervisor::ControlFacade& facade) : facade_(facade) {}

  // Any thread.
  void set_serving(bool serving) { serving_.store(serving); }
  // Any thread. Calls the facade at most once.
  Health check(const std::string& service);

 private:
  supervisor::ControlFacade& facade_;
  std::atomic<bool> serving_{false};
};

// grpc.health.v1.Health over the HealthModel, for users who may read.
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
  // True: the service was stopped.
  bool pause();

  Status authorize(const grpc::ServerContext& context);

  HealthModel& model_;
  supervisor::ControlFacade& facade_;
  const Callers& callers_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;  // guarded by mutex_
};

// The reflection protocol of gRPC, for users who may read. A tool without .proto files asks it first. gRPC's
// own service does not check the user.
class ReflectionService final : public grpc::reflection::v1alpha::ServerReflection::Service {
 public:
  using Request = grpc::reflection::v1alpha::ServerReflectionRequest;
  using Response = grpc::reflection::v1alpha::ServerReflectionResponse;

  ReflectionService(supervisor::ControlFacade& facade, const Callers& callers)
      : facade_(facade), callers_(callers) {}

  grpc::Status ServerReflectionInfo(grpc::ServerContext* context,
                                    grpc::ServerReaderWriter<Response, Request>* stream) override;

 private:
  supervisor::ControlFacade& facade_;
  const Callers& callers_;
};

}  // namespace epd::control
