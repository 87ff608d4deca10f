// One connection of the control plane: bytes between the client's socket and a socket of gRPC's.
//
// gRPC drops descriptors that come with bytes, and closes sockets whose queues hold some, on threads that all
// calls share; each close may block for as long as the client likes (base/airlock.h). So gRPC never has the
// client's socket.
#pragma once

#include "base/fd.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace epd {

// How many bytes a user's clients may send: many at once, then few. gRPC keeps some kilobytes for each stream
// that a client opens and resets, and has no limit of its own for them; a stream costs a client some 30
// bytes.
class ByteBudget {
 public:
  static constexpr std::uint64_t kBurst = 256 << 10;
  static constexpr std::uint64_t kPerSecond = 32 << 10;

  void refill(std::uint64_t now_ns);
  std::size_t left() const { return left_; }
  void spend(std::size_t bytes) { left_ -= bytes; }

 private:
  std::size_t left_ = kBurst;
  std::uint64_t filled_ns_ = 0;
};

class Relay {
 public:
  // `budget` may be null: no limit.
  Relay(UniqueFd client, UniqueFd inner, std::shared_ptr<ByteBudget> budget)
      : client_(std::move(client)), inner_(std::move(inner)), budget_(std::move(budget)) {}

  int client() const { return client_.get(); }
  int inner() const { return inner_.get(); }
  // It may not send now, and may later.
  bool must_wait() const { return budget_ != nullptr && budget_->left() == 0; }
  // What to poll for; 0: not at all.
  short client_events() const;
  short inner_events() const;
  // Moves what can be moved without waiting. False: the connection is over.
  bool move();
  // For the airlock.
  UniqueFd take_client() { return std::move(client_); }

 private:
  struct Direction {
    std::array<char, 32 << 10> bytes;
    std::size_t begin = 0;
    std::size_t end = 0;
    bool ended = false;

    bool empty() const { return begin == end; }
  };
  enum class Read { kOk, kOver };
  Read read_client();
  Read read_inner();
  static bool write(int socket, Direction& direction);

  UniqueFd client_;
  UniqueFd inner_;
  std::shared_ptr<ByteBudget> budget_;
  Direction up_;    // to gRPC
  Direction down_;  // to the client
  bool told_end_ = false;
};

}  // namespace epd
