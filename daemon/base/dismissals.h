// Connections beyond the gate's limits. Closing one, or telling it why, may block as long as its peer likes.
// So threads do both: few of them, however many connections a peer makes.
// Only the thread whose table has the sockets, the gate's, may call this.
#pragma once

#include "base/own_table.h"

#include <sys/types.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace epd {

class Dismissals {
 public:
  // While a user's threads are blocked, the next one takes at least this many connections, the one after that
  // twice as many, and so on.
  static constexpr std::size_t kFirstBatch = 64;
  static constexpr std::size_t kLargestBatch = 256;
  // A person may have many uids. Users beyond this number share their threads.
  static constexpr std::size_t kMostUsers = 32;

  // Owns `socket`; `last_words` is sent to it. Throws what a vector throws.
  void add(std::uint32_t uid, int socket, std::vector<std::byte> last_words);
  // Starts threads for waiting connections if enough wait, or for all if there is no room for more.
  void run(bool no_room = false);
  bool waiting() const;

 private:
  struct Dismissed {
    int socket;
    std::vector<std::byte> last_words;
  };
  struct Batch {
    std::vector<Dismissed> dismissed;
    std::vector<int> sockets;  // ascending
    Departure departure;
    std::atomic<pid_t> tid{0};
    std::atomic<bool> done{false};  // its sockets may still be closing
  };
  struct User {
    std::vector<Dismissed> waiting;
    std::vector<std::shared_ptr<Batch>> batches;
  };
  static constexpr std::uint64_t kOthers = ~std::uint64_t{0};

  static void* end_batch(void* argument);
  static bool start(User& user);

  std::map<std::uint64_t, User> users_;  // by uid, or kOthers
};

}  // namespace epd
