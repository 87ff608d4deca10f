// The porter of a control connection (base/gate.h). It carries bytes between the client's socket and a socket
// of gRPC.
//
// gRPC drops descriptors that come with bytes, and closes sockets whose queues hold some, on threads that all
// calls share. Each such close may block as long as the client likes. So gRPC never has the client's socket.
#pragma once

#include "base/clock.h"
#include "base/gate.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace epd::control {

// A user's budget of bytes to send and of streams to begin: many at once, then few. gRPC keeps some 20 kB for
// each stream that a client opens and resets, without a limit. A stream costs a client some 30 bytes. Any
// thread may call.
class RelayBudget {
 public:
  static constexpr std::uint64_t kBurst = 256 << 10;
  static constexpr std::uint64_t kPerSecond = 32 << 10;

  static constexpr std::uint64_t kStreamBurst = 128;
  static constexpr std::uint64_t kStreamsPerSecond = 32;

  struct Left {
    std::size_t bytes;
    std::size_t streams;
  };
  // The budget that is left.
  Left left(std::uint64_t now_ns);
  bool full(std::uint64_t now_ns);
  void spend(std::size_t bytes, std::size_t streams);

 private:
  std::mutex mutex_;
  double bytes_ = kBurst;  // guarded by mutex_, like the following
  double streams_ = kStreamBurst;
  std::uint64_t filled_ns_ = 0;
};

// Finds the places where streams begin (HEADERS) in the bytes of an HTTP/2 client: a preface of 24 bytes,
// then frames. A frame has a head of nine bytes, which says how many follow.
class StreamFinder {
 public:
  // Returns how many of `bytes` may pass if at most `most` streams may begin in them, and counts them as
  // passed. Sets `begun` to the number of streams that begin.
  std::size_t pass(const char* bytes, std::size_t size, std::size_t most, std::size_t& begun);

 private:
  static constexpr std::size_t kHeadBytes = 9;  // three of length, one of type
  static constexpr std::size_t kTypeAt = 3;
  std::size_t skip_ = 24;  // bytes until the next head
  std::size_t head_bytes_ = 0;
  std::size_t length_ = 0;
};

class Relay {
 public:
  // `budget` may be null: no limit.
  Relay(const Doorstep& doorstep, std::shared_ptr<RelayBudget> budget, const Clock& clock)
      : at_(doorstep), budget_(std::move(budget)), clock_(clock) {}

  // Returns when the connection is over.
  void run();
  // Moves everything that moves without waiting. False: the connection is over.
  bool move();
  // The user may not send now, but may later.
  bool must_wait() const;

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
  const std::shared_ptr<RelayBudget> budget_;
  const Clock& clock_;
  Direction up_;    // to gRPC
  Direction down_;  // to the client
  bool told_end_ = false;
  StreamFinder finder_;
  bool begins_stream_ = false;  // the next bytes of the client begin a stream
};

}  // namespace epd::control
