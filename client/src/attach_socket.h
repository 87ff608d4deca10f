// The client's end of the attach protocol: one SOCK_SEQPACKET connection. Only the functions with a deadline
// block.
#pragma once

#include "common/packet.h"
#include "deadline.h"
#include "errors.h"
#include "proto/attach.h"

#include <string>

namespace epd::client {

inline abi::AttachType type_of(const Packet& packet) {
  return static_cast<abi::AttachType>(packet.header.type);
}

inline constexpr const char* kDefaultSocket = "/run/epd/epd.sock";

// Connects before the deadline. DAEMON_LOST: no daemon listens.
Status connect_to(const std::string& path, Deadline deadline, UniqueFd& socket);
// Does not block. kMalformed: `error` says why. A packet may lack descriptors for which this process has no
// room: check_descriptors() tells.
ReceiveResult receive(const UniqueFd& socket, Packet& packet, Status& error);
// RESOURCE_EXHAUSTED: descriptors of the packet are missing.
Status check_descriptors(const Packet& packet);
// Does not block, raises no SIGPIPE. `fds` stay the caller's; at most kMaxMessageFds. DAEMON_LOST: the
// connection is closed. WOULD_BLOCK: the socket is full.
Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const void* body,
            std::size_t body_bytes, const FdList& fds = {});

template <typename T>
Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const T& body) {
  static_assert(std::is_trivially_copyable_v<T>);
  return send(socket, type, request_id, &body, sizeof(T));
}

// Waits until the socket has a packet or is closed; false when the deadline passed first.
bool wait_readable(const UniqueFd& socket, Deadline deadline);
// The same, until it has room or is closed.
bool wait_writable(const UniqueFd& socket, Deadline deadline);

// Ends the session, and waits a moment until the daemon has freed its ranks: then it closes the connection,
// and a later attach finds them free.
void send_detach(const UniqueFd& socket);

// The status and text of a kRefused or kGoodbye packet; INTERNAL if the packet is neither.
Status refusal(const Packet& packet);

}  // namespace epd::client
