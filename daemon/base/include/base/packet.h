// One message of the attach or link protocol over SOCK_SEQPACKET, descriptors included.
#pragma once

#include "base/fd.h"
#include "base/status.h"
#include "proto/wire.h"

#include <sys/socket.h>
#include <sys/uio.h>
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

// Descriptors to send: `{a, b}` or a vector; the sender's own.
class FdList {
 public:
  FdList() = default;
  FdList(std::initializer_list<int> fds) : fds_(fds) {}
  FdList(std::vector<int> fds) : fds_(std::move(fds)) {}
  std::size_t size() const { return fds_.size(); }
  const int* begin() const { return fds_.data(); }
  const int* end() const { return fds_.data() + fds_.size(); }

 private:
  std::vector<int> fds_;
};

enum class ReceiveResult { kPacket, kNothing, kClosed, kMalformed };

// Receives one packet, without blocking, of a sender that is trusted: its descriptors become ours.
// kMalformed: wrong magic, length or descriptor count (they are closed); `error` says which.
ReceiveResult receive_packet(int socket, Packet& packet, Status& error);
// The same of a porter (base/gate.h), which puts `prefix` before each packet. How many descriptors have come
// is not compared with the header, and a malformed one keeps them.
ReceiveResult receive_carried(int socket, Packet& packet, Status& error, iovec prefix);
// What is wrong with a packet longer than any message.
Status too_large();

// Takes over the descriptors that have come with a message.
void append_descriptors(msghdr& message, std::vector<UniqueFd>& fds);

// Sends without blocking and without SIGPIPE. WOULD_BLOCK if the peer does not read.
Status send_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                   std::size_t body_bytes, const FdList& fds = {});

template <typename Type, typename T>
Status send_message(int socket, Type type, const T& body, const FdList& fds = {},
                    std::uint32_t request_id = 0) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(Type) == 2);
  return send_packet(socket, static_cast<std::uint16_t>(type), request_id, &body, sizeof(T), fds);
}

}  // namespace epd
