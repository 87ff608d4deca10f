// One connection of the control plane: bytes between the client's socket and a socket of gRPC's.
//
// gRPC drops descriptors that come with bytes, and closes sockets whose queues hold some, on threads that all
// calls share; each close may block for as long as the client likes (base/airlock.h). So gRPC never has the
// client's socket.
#pragma once

#include "base/fd.h"

#include <array>
#include <cstddef>

namespace epd {

class Relay {
 public:
  Relay(UniqueFd client, UniqueFd inner) : client_(std::move(client)), inner_(std::move(inner)) {}

  int client() const { return client_.get(); }
  int inner() const { return inner_.get(); }
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
  Direction up_;    // to gRPC
  Direction down_;  // to the client
  bool told_end_ = false;
};

}  // namespace epd
