// epd's status as gRPC's, with epd's own name of it in the trailer.
#pragma once

#include "common/status.h"

#include <grpcpp/support/status.h>

namespace epd {

grpc::Status to_grpc(const Status& status);

}  // namespace epd
