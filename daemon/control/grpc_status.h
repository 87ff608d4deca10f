// Converts epd's status to gRPC's, with epd's own name in the trailer.
#pragma once

#include "common/status.h"

#include <grpcpp/support/status.h>

namespace epd::control {

grpc::Status to_grpc(const Status& status);

}  // namespace epd::control
