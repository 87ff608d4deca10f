#include "common/packet.h"

#include "common/descriptor_message.h"

#include <algorithm>
#include <cerrno>

namespace epd {
namespace {

// The error of a packet's header, if any.
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

Status Packet::wrong_size(std::size_t allowed) const {
  return invalid_argument("message type " + std::to_string(header.type) + " has a body of " +
                          std::to_string(body_bytes) + " bytes; allowed: " + std::to_string(allowed));
}

Status too_large() {
  return invalid_argument("packet too large: at most " + std::to_string(abi::kMaxMessageBytes) +
                          " bytes and " + std::to_string(abi::kMaxMessageFds) + " descriptors");
}

ReceiveResult receive_prefixed(int socket, Packet& packet, Status& error, iovec prefix) {
  packet.fds.clear();
  packet.fds.reserve(
      abi::kMaxMessageFds);  // where there is no memory nothing is received, and no descriptor lost
  packet.body_bytes = 0;
  iovec parts[3] = {
      prefix, {&packet.header, sizeof(packet.header)}, {packet.body.data(), packet.body.size()}};
  DescriptorMessage message(parts);
  ssize_t n;
  // ECONNRESET: the other end was closed with packets that it had not read. It is reported once, before the
  // packets that the other end sent.
  do {
    n = ::recvmsg(socket, &message.header(), MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && (errno == EINTR || errno == ECONNRESET));
  if (n < 0)
    return errno == EAGAIN || errno == EWOULDBLOCK ? ReceiveResult::kNothing : ReceiveResult::kClosed;
  message.take_descriptors(packet.fds);
  if (n == 0) return ReceiveResult::kClosed;
  const std::size_t received = static_cast<std::size_t>(n) - std::min<std::size_t>(n, prefix.iov_len);
  error = check_header(packet, received, message.header().msg_flags);
  if (!error.ok()) return ReceiveResult::kMalformed;
  packet.body_bytes = received - sizeof(abi::WireHeader);
  return ReceiveResult::kPacket;
}

ReceiveResult receive_packet(int socket, Packet& packet, Status& error, bool may_lack_fds) {
  ReceiveResult result = receive_prefixed(socket, packet, error, {});
  const bool wrong =
      may_lack_fds ? packet.fds.size() > packet.header.num_fds : packet.fds.size() != packet.header.num_fds;
  if (result == ReceiveResult::kPacket && wrong) {
    error = invalid_argument("packet says " + std::to_string(packet.header.num_fds) +
                             " descriptors; received " + std::to_string(packet.fds.size()));
    result = ReceiveResult::kMalformed;
  }
  if (result != ReceiveResult::kPacket) packet.fds.clear();
  return result;
}

int transmit_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                    std::size_t body_bytes, const FdList& fds) {
  EPD_CHECK(body_bytes + sizeof(abi::WireHeader) <= abi::kMaxMessageBytes);
  abi::WireHeader header{abi::kWireMagic, type, static_cast<std::uint16_t>(fds.size()),
                         static_cast<std::uint32_t>(sizeof(abi::WireHeader) + body_bytes), request_id};
  iovec parts[2] = {{&header, sizeof(header)}, {const_cast<void*>(body), body_bytes}};
  DescriptorMessage message(parts, fds);
  ssize_t n;
  do {
    n = ::sendmsg(socket, &message.header(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  return n < 0 ? errno : 0;
}

Status send_packet(int socket, std::uint16_t type, std::uint32_t request_id, const void* body,
                   std::size_t body_bytes, const FdList& fds) {
  const int error = transmit_packet(socket, type, request_id, body, body_bytes, fds);
  if (error == 0) return {};
  if (error == EAGAIN || error == EWOULDBLOCK) return would_block("the peer does not read its socket");
  return errno_status("sendmsg type " + std::to_string(type), error);
}

}  // namespace epd
