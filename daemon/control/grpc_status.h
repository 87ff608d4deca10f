// Converts epd's status to gRPC's, with epd's own name in the trailer.
#pragma once

#include "common/status.h"

#include <grpcpp/support/status.h>
#include <string_view>

namespace epd::control {

grpc::Status to_grpc(const Status& status);
// "NOT_FOUND"
std::string_view code_name(grpc::StatusCode code);

}  // namespace epd::control
