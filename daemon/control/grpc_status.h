// epd's status as gRPC's, with epd's own name of it in the trailer.
#pragma once

#include "translate.h"

#include <grpcpp/support/status.h>

namespace epd {

inline grpc::Status to_grpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(grpc_code(status.code())), refusal_text(status.message()),
          error_details(status)};
}

}  // namespace epd
