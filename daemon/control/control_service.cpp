#include "control_service.h"

#include "translate.h"

#include <grpcpp/grpcpp.h>
#include <utility>
#include "epd/v1/control.grpc.pb.h"

namespace epd {
namespace {

grpc::Status to_grpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(grpc_code(status.code())), clean_text(status.message()),
          error_details(status)};
}

template <typename View, typename Message>
grpc::Status answer(Result<std::vector<View>> views, google::protobuf::RepeatedPtrField<Message>* messages) {
  if (!views.ok()) return to_grpc(views.status());
  translate(std::move(views).value(), *messages);
  return grpc::Status::OK;
}

class ControlService final : public v1::Control::Service {
 public:
  explicit ControlService(ControlFacade& facade) : facade_(facade) {}

  grpc::Status GetStatus(grpc::ServerContext* /*context*/, const v1::GetStatusRequest* /*request*/,
                         v1::GetStatusResponse* response) override {
    auto daemon = facade_.daemon();
    if (!daemon.ok()) return to_grpc(daemon.status());
    translate(*daemon, *response->mutable_daemon());
    return answer(facade_.devices(), response->mutable_devices());
  }

  grpc::Status ListDevices(grpc::ServerContext* /*context*/, const v1::ListDevicesRequest* /*request*/,
                           v1::ListDevicesResponse* response) override {
    return answer(facade_.devices(), response->mutable_devices());
  }

  grpc::Status ListSessions(grpc::ServerContext* /*context*/, const v1::ListSessionsRequest* /*request*/,
                            v1::ListSessionsResponse* response) override {
    return answer(facade_.sessions(), response->mutable_sessions());
  }

  grpc::Status ListGroups(grpc::ServerContext* /*context*/, const v1::ListGroupsRequest* /*request*/,
                          v1::ListGroupsResponse* response) override {
    return answer(facade_.groups(), response->mutable_groups());
  }

  grpc::Status ListOperations(grpc::ServerContext* /*context*/, const v1::ListOperationsRequest* /*request*/,
                              v1::ListOperationsResponse* response) override {
    return answer(facade_.operations(), response->mutable_operations());
  }

  grpc::Status GetConfig(grpc::ServerContext* /*context*/, const v1::GetConfigRequest* /*request*/,
                         v1::GetConfigResponse* response) override {
    return answer(facade_.config(), response->mutable_entries());
  }

  grpc::Status Drain(grpc::ServerContext* /*context*/, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override {
    if (Status status = facade_.drain(request->timeout_ms()); !status.ok()) return to_grpc(status);
    // The drain has begun, whatever the next call says: an idle daemon may be gone already.
    if (auto daemon = facade_.daemon(); daemon.ok()) translate(*daemon, *response->mutable_daemon());
    return grpc::Status::OK;
  }

  grpc::Status GetVersion(grpc::ServerContext* /*context*/, const v1::GetVersionRequest* /*request*/,
                          v1::GetVersionResponse* response) override {
    auto daemon = facade_.daemon();
    if (!daemon.ok()) return to_grpc(daemon.status());
    response->set_version(clean_text(daemon->version));
    response->set_boot_id(clean_text(daemon->boot_id));
    response->set_grpc_version(grpc::Version());
    translate_abi(*response);
    return grpc::Status::OK;
  }

 private:
  ControlFacade& facade_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_control_service(ControlFacade& facade) {
  return std::make_unique<ControlService>(facade);
}

}  // namespace epd
