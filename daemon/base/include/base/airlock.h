// Where descriptors that a peer passes are received, and where what is a peer's is closed.
//
// The last close of a descriptor may block for as long as its maker likes: a socket that lingers, a file on
// FUSE. A thread that receives a packet with such descriptors may block, and so does one that closes a socket
// whose queue still holds such a packet. So neither happens in this process's descriptor table:
// - A packet with descriptors is received by a child process with a table of its own, which passes on what
// may be memory
//   and ends.
// - A socket is closed by a thread with a table of its own: it takes copies, we close ours, which are not the
// last, and
//   the thread ends.
// The kernel closes the descriptors of a task that ends without lingering; what blocks nevertheless blocks
// that task.
#pragma once

#include "base/packet.h"

#include <sys/types.h>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace epd {

// Threads: all calls from one.
class Airlock {
 public:
  static constexpr std::size_t kSlots = 64;  // closed by one thread
  // Children of one user, and of all, that have not ended yet after receive(): far more than honest joins
  // leave.
  static constexpr std::size_t kMaxHeldUpPerUser = 64;
  static constexpr std::size_t kMaxHeldUp = 256;

  // Early: tables of one's own copy the descriptors that are there now, and no later ones.
  static Result<std::unique_ptr<Airlock>> create();
  Airlock(const Airlock&) = delete;
  // What has not been closed yet stays open until the process ends.
  ~Airlock();

  // For a packet that receive_from_peer() has left in the socket because it carries descriptors: takes it off
  // and fills packet.fds, if they are as many as its header says and each may be memory (a memfd, what CUDA
  // exports). Otherwise an error, and none of them is ever in this process. `uid`: the peer's.
  struct Received {
    Status status;
    std::optional<std::uint32_t> not_memory;  // index of the first descriptor that can't be
  };
  Received receive(int socket, std::uint32_t uid, Packet& packet);

  // Shuts a peer's socket down now: the peer reads our last words and then the end. Closes it later.
  void close_socket(UniqueFd socket);
  // Closes, later, what may take long, such as the last reference to memory.
  void close(UniqueFd descriptor);
  // Packets that lie unread in `socket` and carry no descriptors: so that the peer reads our last words, not
  // ECONNRESET.
  static void read_out(int socket);
  // Goes on with closing; to be called at each turn, and again after next_look_ms(), -1 for never.
  void flush();
  int next_look_ms() const;
  std::size_t waiting() const { return doomed_.size(); }
  // No thread could be started for what waits.
  bool held_up() const { return held_up_; }

 private:
  struct Child {
    pid_t pid;
    std::uint32_t uid;
  };
  // A thread that closes what lies in the slots. Shared with it.
  struct Closer {
    enum State : std::uint32_t { kStarting, kHasCopies, kFailed, kMayEnd };
    std::atomic<std::uint32_t> state{kStarting};
    int top = 0;
  };

  Airlock() = default;
  static void* run_closer(void* closer);
  bool start_closer();
  void clear_slots();
  Result<pid_t> start_child();
  void reap();
  Status check_held_up(std::uint32_t uid) const;
  Status take_passed(std::size_t count, Packet& packet);

  UniqueFd placeholder_;  // what lies in a slot that is not in use
  std::array<UniqueFd, kSlots> slots_;
  UniqueFd receiving_slot_;
  UniqueFd own_end_;  // of a socketpair: what a child lets through
  UniqueFd child_end_;
  int top_ = 0;  // the highest number among those above
  std::deque<UniqueFd> doomed_;
  bool held_up_ = false;
  std::size_t closing_ = 0;  // the first of doomed_, which closer_ is about
  std::shared_ptr<Closer> closer_;
  std::vector<Child> children_;
  std::unique_ptr<struct AirlockJob> job_;
};

}  // namespace epd
