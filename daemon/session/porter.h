// The porter of a client (base/gate.h): carries the packets of its attach socket, looks at descriptors, and
// passes on the rings of its doorbells.
#pragma once

#include "base/gate.h"
#include "common/packet.h"

#include <sys/uio.h>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace epd {

// What the loop asks of a porter; anything below is a message for the client.
inline constexpr std::uint16_t kPorterOrders = 0xff00;
enum class PorterOrder : std::uint16_t {
  kAdmit = kPorterOrders,  // only now does it receive
  kTakeBells,              // with what Bells names, in this order
  kRing,                   // the client
};

// The doorbells of a session. Those of the client's are sockets that no loop touches; the others are eventfds
// of the daemon's own.
struct Bells {
  int from_client = -1;  // the client rings for the engine
  int to_client = -1;
  int engine = -1;       // to ring for the engine
  int ring_client = -1;  // the engine wants the client rung
};

// What stands before each packet that a porter brings. Descriptors come along if they are as many as the
// packet says and each may be memory (a memfd, what CUDA exports): otherwise none.
struct Carried {
  std::uint32_t num_fds = 0;     // that came with the packet
  std::int32_t not_memory = -1;  // index of the first that can't be memory
  std::uint32_t truncated = 0;   // 1: longer than any message
  std::uint32_t too_many = 0;    // 1: this connection has brought too many that are no memory
};

// To a porter, through the loop's end of the inner pair.
Status order(int socket, PorterOrder what, const FdList& fds = {});

class PacketPorter {
 public:
  enum class Moved { kYes, kNotNow, kOver };

  explicit PacketPorter(const Doorstep& doorstep) : at_(doorstep) {}
  ~PacketPorter();
  PacketPorter(const PacketPorter&) = delete;
  PacketPorter& operator=(const PacketPorter&) = delete;
  // Until the client or the loop ends the connection, or the client's process ends.
  void run();
  // Moves what can be moved without waiting. False: the connection is over.
  bool move();
  // What may linger is not closed with this, but with the thread's table.
  void leave_to_the_kernel();

 private:
  // A packet on its way, with its descriptors, which are this thread's.
  struct Load {
    std::array<std::byte, sizeof(abi::WireHeader) + abi::kMaxMessageBytes> data{};
    std::size_t bytes = 0;
    std::vector<int> fds;
    bool truncated = false;
    bool full = false;

    Moved receive(int socket);
    // `prefix` may be empty.
    Moved send(int socket, iovec prefix, bool with_fds);
    void drop();
    abi::WireHeader header() const;
  };
  bool carry_in();
  bool carry_out();
  Moved take_in();
  Moved obey();
  Moved tell();
  void keep_until_the_end(std::vector<int>& fds);
  void take_bells();
  void pass_rings();
  bool clear_from_client() const;
  void say_farewell() const;

  const Doorstep at_;
  bool admitted_ = false;
  bool deaf_ = false;      // the client takes nothing any more
  std::vector<int> kept_;  // descriptors that are no memory
  Bells bells_;
  Load in_;   // for the loop
  Load out_;  // for the client
  Carried note_;
};

// Runs one.
void carry_packets(const Doorstep& doorstep);

}  // namespace epd
