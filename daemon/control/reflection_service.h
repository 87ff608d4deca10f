// The reflection protocol of gRPC, for users who may read. A tool without .proto files asks it first. gRPC's
// own service does not check the user.
#pragma once

#include "callers.h"

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

namespace epd::control {

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
