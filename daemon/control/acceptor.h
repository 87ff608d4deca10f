// Accepts connections of the control plane, passes their inner ends to gRPC, and keeps who made each. No gRPC
// here.
//
// gRPC's own listener does not say who calls, and does not survive what a client may do to a socket
// (relay.h).
#pragma once

#include "base/gate.h"
#include "base/socket_use.h"
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

namespace epd::control {

// Far more than operators and probes open, and far less than would be missed elsewhere. Root and the daemon's
// own user have as many for themselves. No user can keep others out.
inline constexpr std::size_t kMaxConnections = 64;
inline constexpr std::size_t kMaxConnectionsPerUser = 24;
inline constexpr std::size_t kMaxEndingPerUser = 64;

// The connections whose porters have not ended. Any thread may call.
class Connections {
 public:
  explicit Connections(Callers& callers) : callers_(&callers) {}

  // The task that the gate runs for each connection. `own` keeps this object alive while it runs.
  static Porter porter(const std::shared_ptr<Connections>& own, std::uint64_t number,
                       const PeerIdentity& peer);
  // OK, or the reason if it is one too many. After OK the caller is registered for gRPC.
  Status admit(std::uint64_t number, int grpc_end, const PeerIdentity& peer);
  // Waits until all have ended, or the time is over. Removes the registered callers.
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
  Callers* callers_;                                               // guarded by mutex_, like the following
  std::map<std::uint64_t, Connection> connections_;                // by number
  std::map<std::uint32_t, std::shared_ptr<RelayBudget>> budgets_;  // of users; removed when all are full
  const MonotonicClock clock_;
};

class Acceptor {
 public:
  using Take = std::function<void(int fd, bool privileged)>;
  // `take` owns gRPC's end. It is called on the acceptor's thread. `callers` outlives the acceptor.
  static Result<std::unique_ptr<Acceptor>> start(UniqueFd listener, std::string path, Callers& callers,
                                                 Take take);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Accepts no more connections, and removes the socket. Open connections go on.
  void stop_accepting();
  // For after gRPC has closed its ends: sends what is left, then ends all connections.
  void stop();

 private:
  Acceptor(std::shared_ptr<Connections> connections, std::unique_ptr<Gate> gate, UniqueFd wake,
           std::string path, Take take)
      : connections_(std::move(connections)),
        gate_(std::move(gate)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        file_(file_at(path_)),
        take_(std::move(take)) {}
  void run();
  void admit(Gate::Arrival arrival);
  Status check_ending(std::uint32_t uid) const;

  const std::shared_ptr<Connections> connections_;
  std::unique_ptr<Gate> gate_;  // used by the thread alone while it runs
  const UniqueFd wake_;         // rung once, to end the thread
  const std::string path_;
  const FileId file_;  // there
  const Take take_;
  std::thread thread_;
};

}  // namespace epd::control
