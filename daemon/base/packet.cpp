#include "base/packet.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <algorithm>
#include <cerrno>

namespace epd {
namespace {

// What is wrong with a packet's header, if anything.
Status check_header(const Packet& packet, std::size_t received, int flags) {
  if (received < sizeof(abi::WireHeader)) {
    return invalid_argument("packet of " + std::to_string(received) + " bytes; at least " +
                            std::to_string(sizeof(abi::WireHeader)));
  }
  if ((flags & MSG_TRUNC) != 0) return too_large();
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

Status too_large() {
  return invalid_argument("packet too large: at most " + std::to_string(abi::kMaxMessageBytes) +
                          " bytes and " + std::to_string(abi::kMaxMessageFds) + " descriptors");
}

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

ReceiveResult receive_carried(int socket, Packet& packet, Status& error, iovec prefix) {
  packet.fds.clear();
  packet.body_bytes = 0;
  iovec parts[3] = {
      prefix, {&packet.header, sizeof(packet.header)}, {packet.body.data(), packet.body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return ReceiveResult::kNothing;
    return ReceiveResult::kClosed;
  }
  append_descriptors(message, packet.fds);
  if (n == 0) return ReceiveResult::kClosed;
  const std::size_t received = static_cast<std::size_t>(n) - std::min<std::size_t>(n, prefix.iov_len);
  if (error = check_header(packet, received, message.msg_flags); !error.ok())
    return ReceiveResult::kMalformed;
  packet.body_bytes = received - sizeof(abi::WireHeader);
  return ReceiveResult::kPacket;
}

ReceiveResult receive_packet(int socket, Packet& packet, Status& error) {
  ReceiveResult result = receive_carried(socket, packet, error, {});
  if (result == ReceiveResult::kPacket && packet.header.num_fds != packet.fds.size()) {
    error = invalid_argument("packet says " + std::to_string(packet.header.num_fds) +
                             " descriptors; received " + std::to_string(packet.fds.size()));
    result = ReceiveResult::kMalformed;
  }
  if (result != ReceiveResult::kPacket) packet.fds.clear();
  return result;
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
