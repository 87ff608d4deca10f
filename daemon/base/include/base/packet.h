// One message of the attach or link protocol over SOCK_SEQPACKET, descriptors included.
#pragma once

#include "base/fd.h"
#include "base/status.h"
#include "proto/wire.h"

#include <array>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

namespace epd {

struct Packet {
  abi::WireHeader header{};
  std::array<std::byte, abi::kMaxMessageBytes> body{};
  std::size_t body_bytes = 0;
  std::vector<UniqueFd> fds;

  // The body as T, if it has exactly T's size.
  template <typename T>
  Result<T> read() const {
    static_assert(std::is_trivially_copyable_v<T>);
    if (body_bytes != sizeof(T)) {
      return invalid_argument("message type " + std::to_string(header.type) + " has a body of " +
                              std::to_string(body_bytes) + " bytes; allowed: " + std::to_string(sizeof(T)));
    }
    T value;
    std::memcpy(&value, body.data(), sizeof(T));
    return value;
  }
};

enum class ReceiveResult { kPacket, kNothing, kClosed, kMalformed };

// Receives one packet without blocking. kMalformed: wrong magic, length or descriptor count (they
// are closed); `error` says which.
ReceiveResult receive_packet(int socket, Packet& packet, Status& error);

// Sends without blocking and without SIGPIPE. WOULD_BLOCK if the peer does not read.
Status send_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                   std::size_t body_bytes, std::initializer_list<int> fds = {});

template <typename Type, typename T>
Status send_message(int socket, Type type, const T& body, std::initializer_list<int> fds = {},
                    std::uint32_t request_id = 0) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(Type) == 2);
  return send_packet(socket, static_cast<std::uint16_t>(type), request_id, &body, sizeof(T), fds);
}

}  // namespace epd
