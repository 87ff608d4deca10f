// Who makes a call, from the kernel.
#pragma once

#include "base/status.h"
#include "supervisor/control_facade.h"

#include <grpcpp/server_context.h>

namespace epd {

// INTERNAL if gRPC does not name the connection's descriptor, or the kernel its peer.
Result<Operator> caller_of(const grpc::ServerContext& context);

}  // namespace epd
