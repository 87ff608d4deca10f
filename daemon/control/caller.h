// The user who makes a call, as the kernel knows it.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <grpcpp/server_context.h>
#include <map>
#include <mutex>
#include <optional>

namespace epd::control {

// The clients of connections, by the number of the descriptor that gRPC has for each. gRPC names the peer of
// such a connection "fd:N", and closes N only when all calls of the connection have ended. So N names one
// connection as long as a call of it lives. Any thread may call.
class Callers {
 public:
  // `connection` is a unique number.
  void add(int fd, std::uint64_t connection, supervisor::Operator client);
  // Does nothing if another connection has the descriptor's number now.
  void remove(int fd, std::uint64_t connection);
  // No value: no such connection.
  std::optional<std::uint32_t> uid_of(int fd) const;
  // Whether the user has a connection.
  bool is_connected(std::uint32_t uid) const;
  // INTERNAL: gRPC does not name a connection of ours.
  Result<supervisor::Operator> caller_of(const grpc::ServerContext& context) const;

 private:
  mutable std::mutex mutex_;
  struct Client {
    std::uint64_t connection;
    supervisor::Operator who;
  };
  std::map<int, Client> clients_;  // guarded by mutex_
};

}  // namespace epd::control
