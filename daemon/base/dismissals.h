// Connections that are one too many. Their close may block for as long as a peer likes, and so may telling it
// why; so threads do both, few of them however many connections a peer makes.
//
// Threads: only that whose table has the sockets, the gate's.
#pragma once

#include "base/departure.h"

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
  // While a user's threads stand still, the next takes twice as many connections as the last, at least so
  // many.
  static constexpr std::size_t kFirstBatch = 64;

  // Owns `socket`; `last_words` is sent to it. Throws what a vector throws.
  void add(std::uint32_t uid, int socket, std::vector<std::byte> last_words);
  // Starts threads for those that wait, where it is time.
  void run();
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
    std::atomic<bool> done{false};  // what it had may still be closing
  };
  struct User {
    std::vector<Dismissed> waiting;
    std::vector<std::shared_ptr<Batch>> batches;
  };
  static void* end_batch(void* argument);
  static bool start(User& user);

  std::map<std::uint32_t, User> users_;
};

}  // namespace epd
