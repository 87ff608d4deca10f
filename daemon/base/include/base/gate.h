// Accepts connections of peers, and gives each a thread, its porter. Only the porter touches the peer's
// socket.
//
// A peer can make every call on its socket slow. The last close of a descriptor that it has sent blocks as
// long as the descriptor's maker likes. A wake-up walks all epoll watches on the peer's end, perhaps
// millions, and so do a send, a receive and a shutdown. So no loop of the daemon has such a socket. The gate
// accepts in its own descriptor table. A porter has its own table, too. It carries data between the peer's
// socket and an inner socket, whose other end the loop has. So only the porter waits for its peer.
#pragma once

#include "base/peer.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace epd {

// Descriptors in the porter's table.
struct Doorstep {
  int peer = -1;     // the peer's socket
  int inner = -1;    // the loop has its other end
  int process = -1;  // readable when the peer's process has ended; -1: the process has no number here
};
// The work of a porter. When it returns, its thread ends, and everything in its table is closed. A task that
// ends does not wait for these closes.
using Porter = std::function<void(const Doorstep&)>;

class Gate {
 public:
  struct Arrival {
    std::uint64_t number = 0;  // of the connection
    PeerIdentity peer;
    UniqueFd socket;  // the loop's end of the inner pair, of the listener's type; invalid: none was left
  };
  // Called for each connection, on the gate's thread, which may outlive the gate.
  using MakePorter = std::function<Porter(std::uint64_t number, const PeerIdentity& peer)>;

  // Makes the message for a connection beyond a limit, which is sent from a thread of its own; empty: none.
  using LastWords = std::function<std::vector<std::byte>(const Status& why)>;
  // The limits of connections, open or still being closed: each has a thread. Root and the daemon's own user
  // have `all` to themselves.
  struct Limits {
    std::size_t per_user = 256;
    std::size_t all = 1024;
    const char* hint = "";  // for refusals: what the limit depends on
  };

  // `listener` listens already. From now on only the gate's thread has it. Called early, because a new
  // descriptor table begins as a copy.
  static Result<std::unique_ptr<Gate>> open(UniqueFd listener, MakePorter make, Limits limits,
                                            LastWords last_words = {});
  // Stops accepting. Porters go on until their inner sockets end.
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void set_limits(Limits limits);
  // The number of connections beyond a limit. They don't arrive.
  std::uint64_t dismissed() const;

  // Readable when a connection has arrived.
  int poll_fd() const { return channel_.get(); }
  std::optional<Arrival> take();
  // The number of porters that have been taken and have not ended: of a user, or of all.
  std::size_t porters(std::optional<std::uint32_t> uid) const;

 private:
  Gate(std::shared_ptr<struct GateShared> shared, UniqueFd channel)
      : shared_(std::move(shared)), channel_(std::move(channel)) {}

  std::shared_ptr<struct GateShared> shared_;  // shared with the threads, which are not joined
  UniqueFd channel_;                           // from the gate's thread, which ends with it
};

}  // namespace epd
