// Where peers connect: accepts connections, and gives each a thread, its porter, which alone touches the
// peer's socket.
//
// What a peer can reach of a socket, it can make slow. The last close of a descriptor that it has sent blocks
// for as long as its maker likes. A wake-up walks all the epoll watches that it has put on its end, millions
// if it likes, and so do a send, a receive and a shutdown. So no loop of the daemon's ever has such a socket.
// The gate accepts in a descriptor table of its own. A porter has a table of its own, too: it carries between
// the peer's socket and an inner socket, whose other end is the loop's. Whatever a peer does, its porter
// alone waits for.
#pragma once

#include "base/peer.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace epd {

// In the porter's table.
struct Doorstep {
  int peer = -1;     // the peer's socket
  int inner = -1;    // its other end is the loop's
  int process = -1;  // readable when the peer's process has ended; -1: it has no number here
};
// What a porter does. When it returns its thread ends, and with the thread all that is in its table: a task
// that ends does not linger.
using Porter = std::function<void(const Doorstep&)>;

class Gate {
 public:
  struct Arrival {
    std::uint64_t number = 0;  // of the connection
    PeerIdentity peer;
    UniqueFd socket;  // the loop's end of the inner pair, of the listener's type; invalid: no descriptor left
  };
  // Called for each connection on the gate's thread, which may outlive the gate.
  using MakePorter = std::function<Porter(std::uint64_t number, const PeerIdentity& peer)>;

  // What a connection is told, on a thread of its own, that has one too many before it; empty: nothing.
  using LastWords = std::function<std::vector<std::byte>(const Status& why)>;
  // Connections at one time, open or still being closed: each has a thread. Root and the daemon's own user
  // have `all`, whatever others have.
  struct Limits {
    std::size_t per_user = 256;
    std::size_t all = 1024;
    const char* hint = "";  // for refusals: what the limit depends on
  };

  // `listener` listens already; it is the gate's thread's alone from now on. Early: a table of one's own
  // begins as a copy.
  static Result<std::unique_ptr<Gate>> open(UniqueFd listener, MakePorter make, Limits limits,
                                            LastWords last_words = {});
  // Nobody is accepted any more. Porters go on until their inner sockets end.
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void set_limits(Limits limits);
  // Connections that had one too many before them. They don't arrive.
  std::uint64_t dismissed() const;

  // Readable when somebody has arrived.
  int poll_fd() const { return channel_.get(); }
  std::optional<Arrival> take();
  // Porters of a user's connections, or of all, that have been taken and have not ended.
  std::size_t porters(std::optional<std::uint32_t> uid) const;

 private:
  Gate(std::shared_ptr<struct GateShared> shared, UniqueFd channel)
      : shared_(std::move(shared)), channel_(std::move(channel)) {}

  std::shared_ptr<struct GateShared> shared_;  // with the threads, which nobody waits for
  UniqueFd channel_;                           // from the gate's thread, which ends with it
};

}  // namespace epd
