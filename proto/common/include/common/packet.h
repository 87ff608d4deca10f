// One message of the attach or link protocol over SOCK_SEQPACKET, descriptors included.
#pragma once

#include "common/fd.h"
#include "common/status.h"
#include "proto/wire.h"

#include <sys/uio.h>
#include <array>
#include <cstring>
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
    if (body_bytes != sizeof(T)) return wrong_size(sizeof(T));
    T value;
    std::memcpy(&value, body.data(), sizeof(T));
    return value;
  }

 private:
  Status wrong_size(std::size_t allowed) const;
};

using FdList = std::vector<int>;  // descriptors to send, which stay the sender's

enum class ReceiveResult { kPacket, kNothing, kClosed, kMalformed };

// Receives one packet, without blocking, of a sender that is trusted: its descriptors become ours.
// kMalformed: wrong magic, length or descriptor count (they are closed); `error` says which. `may_lack_fds`:
// a packet arrives with fewer descriptors than its header says if this process can hold no more.
ReceiveResult receive_packet(int socket, Packet& packet, Status& error, bool may_lack_fds = false);
// The same with `prefix` before the packet. How many descriptors have come is not compared with the header,
// and a malformed packet keeps them.
ReceiveResult receive_prefixed(int socket, Packet& packet, Status& error, iovec prefix);
// The error of a packet longer than any message.
Status too_large();

// Sends without blocking and without SIGPIPE: 0, or the error number of sendmsg().
int transmit_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                    std::size_t body_bytes, const FdList& fds = {});
// The same. WOULD_BLOCK if the peer does not read.
Status send_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                   std::size_t body_bytes, const FdList& fds = {});

template <typename Type, typename T>
Status send_message(int socket, Type type, const T& body, const FdList& fds = {},
                    std::uint32_t request_id = 0) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(Type) == 2);
  return send_packet(socket, static_cast<std::uint16_t>(type), request_id, &body, sizeof(T), fds);
}

}  // namespace epd
