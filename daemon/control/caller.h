// Who makes a call, from the kernel.
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <grpcpp/server_context.h>
#include <map>
#include <mutex>
#include <optional>

namespace epd {

// The clients of connections, by the number of the descriptor that gRPC has been given for each. gRPC calls
// the peer of such a connection "fd:N", and closes N only when every call of the connection has ended. So N
// names one connection for as long as a call of it lives. From any thread.
class Callers {
 public:
  // `connection`: a number of its own.
  void add(int fd, std::uint64_t connection, Operator client);
  // Unless another connection has the descriptor's number by now.
  void remove(int fd, std::uint64_t connection);
  // No value: there is no such connection.
  std::optional<std::uint32_t> uid_of(int fd) const;
  // Whether the user has a connection.
  bool is_connected(std::uint32_t uid) const;
  // INTERNAL if gRPC does not name a connection that is here.
  Result<Operator> caller_of(const grpc::ServerContext& context) const;

 private:
  mutable std::mutex mutex_;
  struct Client {
    std::uint64_t connection;
    Operator who;
  };
  std::map<int, Client> clients_;  // guarded by mutex_
};

}  // namespace epd
