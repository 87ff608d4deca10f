// Takes the control plane's connections in and hands their inner ends to gRPC; keeps who made each. No gRPC
// here.
//
// gRPC's own listener would neither tell who calls, nor survive what a client may do to a socket (relay.h).
#pragma once

#include "base/gate.h"
#include "caller.h"
#include "relay.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace epd {

// Far above what operators and probes open, far below what would be missed elsewhere. Root and the daemon's
// own user have as many of their own: nobody can keep them out. No one user can keep the others out.
inline constexpr std::size_t kMaxConnections = 64;
inline constexpr std::size_t kMaxConnectionsPerUser = 24;
inline constexpr std::size_t kMaxEndingPerUser = 64;

// The connections whose porters have not ended. From any thread.
class Connections {
 public:
  explicit Connections(Callers& callers) : callers_(&callers) {}

  // What the gate runs for each; `own` keeps this alive for as long as that lasts.
  static Porter porter(const std::shared_ptr<Connections>& own, std::uint64_t number,
                       const PeerIdentity& peer);
  // OK, or why there is one too many. From then on the caller has a name for gRPC.
  Status admit(std::uint64_t number, int grpc_end, const PeerIdentity& peer);
  // All have ended, or the time is over; nobody has a name any more.
  void close(std::chrono::milliseconds patience);

 private:
  struct Connection {
    std::uint32_t uid;
    bool privileged;    // root, or the daemon's own user
    int grpc_end = -1;  // gRPC's; -1: not admitted
  };
  std::shared_ptr<RelayBudget> budget_of(std::uint32_t uid);
  void end(std::uint64_t number);

  std::mutex mutex_;
  std::condition_variable ended_;
  Callers* callers_;                                               // guarded by mutex_, as what follows
  std::map<std::uint64_t, Connection> connections_;                // by number
  std::map<std::uint32_t, std::shared_ptr<RelayBudget>> budgets_;  // of users; goes when all are full again
  const MonotonicClock clock_;
};

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
  // gRPC has closed its ends: what it has said is passed on, and all connections end.
  void stop();

 private:
  Acceptor(std::shared_ptr<Connections> connections, std::unique_ptr<Gate> gate, UniqueFd wake,
           std::string path, Take take)
      : connections_(std::move(connections)),
        gate_(std::move(gate)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        take_(std::move(take)) {}
  void run();
  void admit(Gate::Arrival arrival);
  Status check_ending(std::uint32_t uid) const;

  const std::shared_ptr<Connections> connections_;
  std::unique_ptr<Gate> gate_;  // the thread's while it runs
  const UniqueFd wake_;         // rung once: the thread is to end
  const std::string path_;
  const Take take_;
  std::thread thread_;
};

}  // namespace epd
