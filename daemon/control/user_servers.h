// One gRPC server for each user, so that no user's calls take another's threads.
//
// A call of gRPC's synchronous API holds a thread until its client has read the answer. A hostile client does
// not read, and ignores limits of streams. So each connected user has a server with 16 threads and its own
// memory.
#pragma once

#include "caller.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace grpc {
class Server;
}

namespace epd::control {

class UserServers {
 public:
  // The number of users with a server at the same time. Users above it share servers.
  static constexpr std::size_t kMost = 8;

  using Build = std::function<std::unique_ptr<grpc::Server>(bool privileged)>;
  // `build` may return null. `callers` outlives this, and knows each connection before take().
  UserServers(Build build, const Callers& callers);
  ~UserServers();

  // Whether the server of root and the daemon's own user could be made.
  bool start();
  // Takes `fd`, gRPC's end of a connection.
  void take(int fd, bool privileged);
  // Ends all calls, after `deadline` by force. Connections that are taken later are closed.
  void shutdown(std::chrono::system_clock::time_point deadline);

 private:
  struct Room {
    std::unique_ptr<grpc::Server> server;
    std::uint32_t uid = 0;  // the user who has or had it
  };
  grpc::Server* server_of(std::uint32_t uid);
  static void end(std::unique_ptr<grpc::Server>& server, std::chrono::system_clock::time_point deadline);

  const Build build_;
  const Callers& callers_;
  std::mutex mutex_;
  bool stopped_ = false;                      // guarded by mutex_
  std::unique_ptr<grpc::Server> privileged_;  // guarded like the next, until stopped_
  std::array<Room, kMost> rooms_;             // in the order of first use
};

}  // namespace epd::control
