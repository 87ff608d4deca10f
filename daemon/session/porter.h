// The porter of a client (base/gate.h). It carries the packets of the client's attach socket, checks
// descriptors, and passes on rings of its doorbells.
#pragma once

#include "base/gate.h"
#include "common/packet.h"

#include <sys/uio.h>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace epd::session {

// The loop's orders to a porter. Any smaller number is a message for the client.
inline constexpr std::uint16_t kPorterOrders = 0xff00;
enum class PorterOrder : std::uint16_t {
  kAdmit = kPorterOrders,  // begins to receive
  kTakeBells,              // with the descriptors of Bells, in this order
  kRing,                   // rings the client
};

// The doorbells of a session. Those that the client has are sockets, which no loop touches. The others are
// eventfds of the daemon.
struct Bells {
  int from_client = -1;  // the client rings for the engine
  int to_client = -1;
  int engine = -1;       // rings the engine
  int ring_client = -1;  // the engine asks to ring the client
};

// The header of each packet that a porter brings. The descriptors come along only if all of them have arrived
// and each may be memory (a memfd, or what CUDA exports).
struct Carried {
  std::uint32_t num_fds = 0;     // descriptors that came with the packet
  std::int32_t not_memory = -1;  // index of the first that can't be memory
  std::uint32_t truncated = 0;   // 1: longer than any message
  std::uint32_t too_many = 0;    // 1: this connection has brought too many that are no memory
};

// Sends an order to a porter, through the loop's end of the inner pair.
Status order(int socket, PorterOrder what, const FdList& fds = {});

class PacketPorter {
 public:
  enum class Moved { kYes, kNotNow, kOver };

  explicit PacketPorter(const Doorstep& doorstep) : at_(doorstep) {}
  ~PacketPorter();
  PacketPorter(const PacketPorter&) = delete;
  PacketPorter& operator=(const PacketPorter&) = delete;
  // Returns when the client or the loop has ended the connection, or the client's process has ended.
  void run();
  // Moves everything that moves without waiting. False: the connection is over.
  bool move();
  // Descriptors whose close may block are not closed here, but with the thread's table.
  void leave_to_the_kernel();

 private:
  // A packet in transfer, with its descriptors, which belong to this thread.
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
  bool deaf_ = false;      // the client receives nothing more
  std::vector<int> kept_;  // descriptors that are not memory
  Bells bells_;
  Load in_;   // for the loop
  Load out_;  // for the client
  Carried note_;
};

// Runs a porter.
void carry_packets(const Doorstep& doorstep);

}  // namespace epd::session
