// Accepts the control plane's connections, keeps who made each, and relays their bytes to gRPC. No gRPC here.
//
// gRPC's own listener would neither tell who calls, nor survive what a client may do to a socket (relay.h).
// Each connection is a Relay; gRPC gets the other end of a socketpair.
#pragma once

#include "base/airlock.h"
#include "caller.h"
#include "relay.h"

#include <poll.h>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>

namespace epd {

// Far above what operators and probes open, far below what would be missed elsewhere. Root and the daemon's
// own user have as many of their own: nobody can keep them out. No one user can keep the others out.
inline constexpr std::size_t kMaxConnections = 64;
inline constexpr std::size_t kMaxConnectionsPerUser = 24;

class Acceptor {
 public:
  using Take = std::function<void(int fd, bool privileged)>;
  // `take` becomes the owner of gRPC's end; called from a thread of the acceptor's own. `callers` outlives
  // the acceptor.
  static Result<std::unique_ptr<Acceptor>> start(UniqueFd listener, std::string path, Callers& callers,
                                                 Take take);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // No connection is taken after this; removes the socket. Those that are there go on.
  void stop_accepting();
  // What gRPC has said is passed on, and all connections end.
  void stop();

 private:
  struct Connection {
    std::uint64_t number = 0;
    std::uint32_t uid = 0;
    bool privileged = false;  // root, or the daemon's own user
    int grpc_end = -1;        // gRPC's
    Relay relay;
  };

  Acceptor(UniqueFd listener, UniqueFd wake, std::string path, Callers& callers,
           std::unique_ptr<Airlock> airlock, Take take)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        callers_(callers),
        airlock_(std::move(airlock)),
        take_(std::move(take)) {}
  void run();
  bool turn();
  void relay(std::size_t first_entry);
  void accept_all();
  Status admit(UniqueFd& socket);
  void end(Connection& connection);
  // Whether somebody waits for more.
  bool refill_budgets();

  UniqueFd listener_;
  UniqueFd wake_;
  std::atomic<bool> refuses_{false};
  std::atomic<bool> stops_{false};
  const std::string path_;
  Callers& callers_;
  std::unique_ptr<Airlock> airlock_;  // the thread's own, as what follows
  const Take take_;
  std::list<Connection> connections_;
  std::map<std::uint32_t, std::shared_ptr<ByteBudget>> budgets_;  // of users; goes when all are full again
  std::vector<pollfd> entries_;
  std::uint64_t last_number_ = 0;
  bool accepts_ = true;
  std::thread thread_;
};

}  // namespace epd
