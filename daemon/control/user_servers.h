// gRPC servers, so that nobody's calls take the threads that another's need.
//
// A call of gRPC's synchronous API holds a thread until its client has read the answer, and a hostile client
// neither reads nor keeps to a limit of streams. So each user that is connected has a server: 16 threads and
// some memory of its own.
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

namespace epd {

class UserServers {
 public:
  // Of users that are connected at the same time; users beyond them share servers.
  static constexpr std::size_t kMost = 8;

  using Build = std::function<std::unique_ptr<grpc::Server>(bool privileged)>;
  // `build` may return null. `callers` outlives this and knows each connection before it is taken here.
  UserServers(Build build, const Callers& callers);
  ~UserServers();

  // Whether the server of root and the daemon's own user could be built.
  bool start();
  // Becomes the owner of `fd`, gRPC's end of a connection.
  void take(int fd, bool privileged);
  // Ends all calls, at `deadline` by force. What is taken after this is closed.
  void shutdown(std::chrono::system_clock::time_point deadline);

 private:
  struct Room {
    std::unique_ptr<grpc::Server> server;
    std::uint32_t uid = 0;  // of the user whose it is or was
  };
  grpc::Server* server_of(std::uint32_t uid);
  static void end(std::unique_ptr<grpc::Server>& server, std::chrono::system_clock::time_point deadline);

  const Build build_;
  const Callers& callers_;
  std::mutex mutex_;
  bool stopped_ = false;                      // guarded by mutex_
  std::unique_ptr<grpc::Server> privileged_;  // this and the next too, until stopped_
  std::array<Room, kMost> rooms_;             // in the order in which they were needed
};

}  // namespace epd
