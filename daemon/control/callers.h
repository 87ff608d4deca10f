// The user who makes a call, as the kernel knows it.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <grpcpp/server_context.h>
#include <sys/types.h>
#include <cstddef>
#include <map>
#include <mutex>

namespace epd::control {

// Each takes a descriptor of the daemon's. Root and the daemon's own user may have as many again.
inline constexpr std::size_t kMaxConnections = 64;

// This table tells who made each connection, by its descriptor. gRPC names the peer of such a connection
// "fd:N", and closes N only when all calls of the connection have ended. So N names one connection as long as
// a call of it lives.
// Any thread may call.
class Callers {
 public:
  // RESOURCE_EXHAUSTED: one connection too many is open.
  Status add(int fd, supervisor::Operator client);
  // INTERNAL: gRPC does not name a connection of ours.
  Result<supervisor::Operator> caller_of(const grpc::ServerContext& context) const;

 private:
  struct Client {
    ino_t socket;
    supervisor::Operator who;
  };
  mutable std::mutex mutex_;
  std::map<int, Client> clients_;  // guarded by mutex_; those that have gone too, until the next one comes
};

}  // namespace epd::control
