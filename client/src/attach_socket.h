// The client's end of the attach protocol: one SOCK_SEQPACKET connection, never blocking on its own.
#pragma once

#include "deadline.h"
#include "proto/attach.h"
#include "shared_memory.h"

#include <array>
#include <cstring>
#include <string>
#include <vector>

namespace epd::client {

struct Packet {
  abi::WireHeader header{};
  std::array<std::byte, abi::kMaxMessageBytes> body{};
  std::size_t body_bytes = 0;
  std::array<UniqueFd, abi::kMaxMessageFds> fds;
  std::size_t num_fds = 0;

  abi::AttachType type() const { return static_cast<abi::AttachType>(header.type); }
  // False if the body is not exactly a T.
  template <typename T>
  bool read(T& value) const {
    if (body_bytes != sizeof(T)) return false;
    std::memcpy(&value, body.data(), sizeof(T));
    return true;
  }
};

enum class Received { kPacket, kNothing, kClosed, kMalformed };

// Connects before the deadline. DAEMON_LOST: nobody listens.
Status connect_to(const std::string& path, Deadline deadline, UniqueFd& socket);
// Does not block. kMalformed: `error` says why; descriptors that came with it are closed.
Received receive(const UniqueFd& socket, Packet& packet, std::string& error);
// Does not block; no SIGPIPE. With descriptors, which stay the caller's; at most kMaxMessageFds. DAEMON_LOST
// if the connection is gone, WOULD_BLOCK if the socket is full.
Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const void* body,
            std::size_t body_bytes, const std::vector<int>& fds = {});

template <typename T>
Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const T& body) {
  static_assert(std::is_trivially_copyable_v<T>);
  return send(socket, type, request_id, &body, sizeof(T));
}

// Waits until the socket has a packet or is closed; false when the deadline passed first.
bool wait_readable(const UniqueFd& socket, Deadline deadline);
// Likewise until it has room, or is closed.
bool wait_writable(const UniqueFd& socket, Deadline deadline);

// The status and text of a kRefused or kGoodbye packet; INTERNAL if the packet is neither.
Status refusal(const Packet& packet);

}  // namespace epd::client
