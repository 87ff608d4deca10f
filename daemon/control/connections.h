// Connections of the control socket: its file, who made each connection, and the thread that accepts them.
#pragma once

#include "base/socket_use.h"
#include "common/fd.h"
#include "common/status.h"
#include "control/control_server.h"
#include "supervisor/control_facade.h"

#include <grpcpp/server_context.h>
#include <sys/types.h>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace epd::control {

// Each connection takes a descriptor of the daemon. Root and the daemon's own user may have this many more.
inline constexpr std::size_t kMaxConnections = 64;

// This table tells who made each connection, by its descriptor, as the kernel knows it. gRPC names the peer
// of such a connection "fd:N", and closes N only when all calls of the connection have ended. So N names one
// connection as long as a call of it lives. Any thread may call.
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
  std::map<int, Client> clients_;  // guarded by mutex_; ended ones stay until the next one comes
};

// Checks that the path is short enough for a socket address, and has no character that gRPC's addresses treat
// specially.
Status check_socket_options(const ControlOptions& options);

// Makes the directory if there is none, and removes a stale socket. ABORTED: a process listens on it.
// INVALID_ARGUMENT: not a socket, or the directory can't be made.
Status clear_socket_path(const std::string& path);

// Binds and listens. Only the owner may open the file until it has its group, and then its mode.
Result<UniqueFd> listen_on(const ControlOptions& options);

// Accepts connections of the control plane, notes who made each, and gives them away. gRPC's own listener
// does not say who calls. No gRPC here.
class Acceptor {
 public:
  // Takes ownership of the connection. Called on the acceptor's thread.
  using Take = std::function<void(int fd)>;
  // `callers` outlives the acceptor, and knows each connection before take().
  static Result<std::unique_ptr<Acceptor>> start(UniqueFd listener, std::string path, Callers& callers,
                                                 Take take);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Accepts no more connections, and removes the socket. Open connections continue.
  void stop();

 private:
  Acceptor(UniqueFd listener, UniqueFd wake, std::string path, Callers& callers, Take take)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        file_(file_at(path_)),
        callers_(callers),
        take_(std::move(take)) {}
  void run();
  void admit(UniqueFd connection);

  UniqueFd listener_;    // used by the thread alone while it runs
  const UniqueFd wake_;  // rung once, to end the thread
  const std::string path_;
  const FileId file_;  // there
  Callers& callers_;
  const Take take_;
  std::thread thread_;
};

}  // namespace epd::control
