#include "base/packet.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <cerrno>

namespace epd {
namespace {

// What is wrong with a packet's header, if anything.
Status check_header(const Packet& packet, std::size_t received, int flags) {
  if (received < sizeof(abi::WireHeader)) {
    return invalid_argument("packet of " + std::to_string(received) + " bytes; at least " +
                            std::to_string(sizeof(abi::WireHeader)));
  }
  if ((flags & MSG_TRUNC) != 0) {
    return invalid_argument("packet too large: at most " + std::to_string(abi::kMaxMessageBytes) +
                            " bytes and " + std::to_string(abi::kMaxMessageFds) + " descriptors");
  }
  if (packet.header.magic != abi::kWireMagic) {
    return invalid_argument("packet magic is " + std::to_string(packet.header.magic) +
                            "; allowed: " + std::to_string(abi::kWireMagic));
  }
  if (packet.header.bytes != received) {
    return invalid_argument("packet says " + std::to_string(packet.header.bytes) + " bytes; received " +
                            std::to_string(received));
  }
  return {};
}

}  // namespace

void append_descriptors(msghdr& message, std::vector<UniqueFd>& fds) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

PeerResult receive_from_peer(int socket, Packet& packet, Status& error) {
  packet.fds.clear();
  packet.body_bytes = 0;
  iovec parts[2] = {{&packet.header, sizeof(packet.header)}, {packet.body.data(), packet.body.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_PEEK);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return PeerResult::kNothing;
    return PeerResult::kClosed;
  }
  // Without room for control data the kernel says only that there was some, and leaves it in the packet.
  const bool has_descriptors = (message.msg_flags & MSG_CTRUNC) != 0;
  if (n == 0 && !has_descriptors) return PeerResult::kClosed;
  const auto received = static_cast<std::size_t>(n);
  if (error = check_header(packet, received, message.msg_flags); !error.ok()) return PeerResult::kMalformed;
  packet.body_bytes = received - sizeof(abi::WireHeader);
  if (has_descriptors) return PeerResult::kDescriptors;
  if (packet.header.num_fds != 0) {
    error =
        invalid_argument("packet says " + std::to_string(packet.header.num_fds) + " descriptors; received 0");
    return PeerResult::kMalformed;
  }
  char byte;
  ::recv(socket, &byte, 1, MSG_DONTWAIT);  // the packet that was looked at: nobody else reads here
  return PeerResult::kPacket;
}

ReceiveResult receive_packet(int socket, Packet& packet, Status& error) {
  packet.fds.clear();
  packet.body_bytes = 0;
  iovec parts[2] = {{&packet.header, sizeof(packet.header)}, {packet.body.data(), packet.body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return ReceiveResult::kNothing;
    return ReceiveResult::kClosed;
  }
  append_descriptors(message, packet.fds);
  if (n == 0) return ReceiveResult::kClosed;
  const auto fail = [&](std::string text) {
    packet.fds.clear();
    error = invalid_argument(std::move(text));
    return ReceiveResult::kMalformed;
  };
  const auto received = static_cast<std::size_t>(n);
  if ((message.msg_flags & MSG_CTRUNC) != 0) message.msg_flags |= MSG_TRUNC;
  if (Status status = check_header(packet, received, message.msg_flags); !status.ok())
    return fail(status.message());
  if (packet.header.num_fds != packet.fds.size()) {
    return fail("packet says " + std::to_string(packet.header.num_fds) + " descriptors; received " +
                std::to_string(packet.fds.size()));
  }
  packet.body_bytes = received - sizeof(abi::WireHeader);
  return ReceiveResult::kPacket;
}

Status send_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                   std::size_t body_bytes, const FdList& fds) {
  EPD_CHECK(body_bytes + sizeof(abi::WireHeader) <= abi::kMaxMessageBytes &&
            fds.size() <= abi::kMaxMessageFds);
  abi::WireHeader header{abi::kWireMagic, type, static_cast<std::uint16_t>(fds.size()),
                         static_cast<std::uint32_t>(sizeof(abi::WireHeader) + body_bytes), request_id};
  iovec parts[2] = {{&header, sizeof(header)}, {const_cast<void*>(body), body_bytes}};
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (fds.size() != 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), fds.begin(), fds.size() * sizeof(int));
  }
  ssize_t n;
  do {
    n = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n >= 0) return {};
  if (errno == EAGAIN || errno == EWOULDBLOCK)
    return {StatusCode::kWouldBlock, "the peer does not read its socket"};
  return errno_status("sendmsg type " + std::to_string(type));
}

}  // namespace epd
