// Accepts the control plane's connections and hands them on. No gRPC here.
//
// gRPC's own listener would not tell who calls. A connection that it is given by descriptor has the peer
// "fd:N", and it closes N only when every call of the connection has ended; so a handler may ask the kernel
// about N (see caller.h).
#pragma once

#include "base/fd.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

namespace epd {

// Far above what operators and probes open, far below what would be missed elsewhere.
inline constexpr std::size_t kMaxConnections = 64;
inline constexpr std::size_t kMaxConnectionsPerUser = 32;

class Acceptor {
 public:
  // `take` becomes the descriptor's owner; called from a thread of the acceptor's own.
  static Result<std::unique_ptr<Acceptor>> start(UniqueFd listener, std::string path,
                                                 std::function<void(int)> take);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // No connection is taken after this; removes the socket.
  void stop();

 private:
  struct Connection {
    std::uint64_t cookie = 0;
    std::uint32_t uid = 0;
  };

  Acceptor(UniqueFd listener, UniqueFd wake, std::string path, std::function<void(int)> take)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        take_(std::move(take)) {}
  void run();
  void accept_all();
  void admit(UniqueFd socket);
  void forget_closed();

  UniqueFd listener_;
  UniqueFd wake_;
  const std::string path_;
  const std::function<void(int)> take_;
  std::map<int, Connection> connections_;  // by descriptor; the thread's own
  std::thread thread_;
};

}  // namespace epd
