// Where descriptors that a peer has passed are received, and where what is a peer's is closed.
//
// The last close of a descriptor may block for as long as its maker likes: a socket that lingers, a file on FUSE. A
// process that receives a packet with such descriptors blocks, and so does one that closes a socket whose queue
// still holds such a packet. So both happen in a child with a descriptor table of its own, which shares
// nothing else that could hold this process up, and ends at once. The kernel closes the descriptors of a process that
// ends without lingering; whatever still blocks then blocks that child alone.
#pragma once

#include "base/packet.h"

#include <sys/types.h>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace epd {

// Threads: all calls from one. Children are reaped by later calls.
class Airlock {
 public:
  static constexpr std::size_t kSlots = 64;  // closed by one child
  // Children of one user, and of all, that may hang in receive().
  static constexpr std::size_t kMaxHeldUpPerUser = 4;
  static constexpr std::size_t kMaxHeldUp = 64;

  // Early: a child copies the descriptors that are there now and no later ones.
  static Result<std::unique_ptr<Airlock>> create();
  Airlock(const Airlock&) = delete;
  // Closes what is left in one more child.
  ~Airlock();

  // For a packet that receive_from_peer() has left in the socket because it carries descriptors: takes it off and
  // fills packet.fds, if they are as many as its header says and each may be memory (a memfd, what CUDA exports).
  // Otherwise an error, and none of them is ever in this process. `uid`: the peer's.
  struct Received {
    Status status;
    std::optional<std::uint32_t> not_memory;  // index of the first descriptor that can't be
  };
  Received receive(int socket, std::uint32_t uid, Packet& packet);

  // Shuts a peer's socket down now: the peer reads our last words and then the end. Closes it at the next flush().
  void close_socket(UniqueFd socket);
  // Closes at the next flush() what may take long, such as the last reference to memory.
  void close(UniqueFd descriptor);
  // Packets that lie unread in `socket` and carry no descriptors: so that the peer reads our last words, not
  // ECONNRESET.
  static void read_out(int socket);
  void flush();
  std::size_t waiting() const { return doomed_.size(); }

 private:
  struct Child {
    pid_t pid;
    bool receives;
    std::uint32_t uid;
  };

  Airlock() = default;
  bool put_into_slot(std::size_t slot, int fd);
  void clear_slots();
  Result<pid_t> start_child();
  void reap();
  Status check_held_up(std::uint32_t uid) const;
  Status take_passed(std::size_t count, Packet& packet);

  UniqueFd placeholder_;             // what lies in a slot that is not in use
  std::array<UniqueFd, kSlots> slots_;
  int top_ = 0;                      // the highest number among slots_ and child_end_
  UniqueFd own_end_;                 // of a socketpair: what a child lets through
  UniqueFd child_end_;
  std::deque<UniqueFd> doomed_;
  std::vector<Child> children_;
  std::unique_ptr<struct AirlockJob> job_;
};

}  // namespace epd
