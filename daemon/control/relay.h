// The porter of a control connection (base/gate.h): bytes between the client's socket and a socket of gRPC's.
//
// gRPC drops descriptors that come with bytes, and closes sockets whose queues hold some, on threads that all
// calls share; each close may block for as long as the client likes. So gRPC never has the client's socket.
#pragma once

#include "base/clock.h"
#include "base/gate.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace epd {

// How many bytes a user's clients may send: many at once, then few. gRPC keeps some kilobytes for each stream
// that a client opens and resets, and has no limit of its own for them; a stream costs a client some 30
// bytes. From any thread.
class ByteBudget {
 public:
  static constexpr std::uint64_t kBurst = 256 << 10;
  static constexpr std::uint64_t kPerSecond = 32 << 10;

  // How many there are now.
  std::size_t left(std::uint64_t now_ns);
  void spend(std::size_t bytes);

 private:
  std::mutex mutex_;
  std::size_t left_ = kBurst;    // guarded by mutex_
  std::uint64_t filled_ns_ = 0;  // likewise
};

class Relay {
 public:
  // `budget` may be null: no limit.
  Relay(const Doorstep& doorstep, std::shared_ptr<ByteBudget> budget, const Clock& clock)
      : at_(doorstep), budget_(std::move(budget)), clock_(clock) {}

  // Until the connection is over.
  void run();
  // Moves what can be moved without waiting. False: the connection is over.
  bool move();
  // Its user may not send now, and may later.
  bool must_wait() const { return budget_ != nullptr && budget_->left(clock_.now_ns()) == 0; }

 private:
  struct Direction {
    std::array<char, 32 << 10> bytes;
    std::size_t begin = 0;
    std::size_t end = 0;
    bool ended = false;

    bool empty() const { return begin == end; }
    bool has_room() const { return empty() && !ended; }
  };
  enum class Read { kOk, kOver };
  bool wait() const;
  Read read_client();
  Read read_inner();
  static long receive(int socket, void* bytes, std::size_t size, int flags, bool& descriptors);
  static bool write(int socket, Direction& direction);

  const Doorstep at_;
  const std::shared_ptr<ByteBudget> budget_;
  const Clock& clock_;
  Direction up_;    // to gRPC
  Direction down_;  // to the client
  bool told_end_ = false;
};

}  // namespace epd
