#include "attach_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <cerrno>
#include <cstddef>

namespace epd::client {
namespace {

void take_descriptors(msghdr& message, Packet& packet, std::size_t& received) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i, ++received) {
      int raw;
      std::memcpy(&raw, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      UniqueFd fd(raw);
      if (received < packet.fds.size()) packet.fds[received] = std::move(fd);
    }
  }
}

bool wait_for(const UniqueFd& socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket.get(), events, 0};
    const timespec slice = to_timespec(deadline.remaining(std::chrono::seconds(1)));
    if (::ppoll(&entry, 1, &slice, nullptr) > 0) return true;
    if (deadline.passed()) return false;
  }
}

}  // namespace

Status connect_to(const std::string& path, Deadline deadline, UniqueFd& socket) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return invalid_argument("socket path \"" + path + "\" has " + std::to_string(path.size()) +
                            " characters; allowed: 1 .. " + std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno_status("socket", errno);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  for (;;) {
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    const int error = errno;
    // EAGAIN: the daemon's backlog is full; the kernel has no event for "there is room again".
    if (error == EAGAIN || error == EINTR) {
      if (deadline.passed()) {
        return {StatusCode::kDeadlineExceeded, "the daemon at " + path + " accepts no connection"};
      }
      const timespec pause = to_timespec(deadline.remaining(std::chrono::milliseconds(2)));
      ::nanosleep(&pause, nullptr);
      continue;
    }
    const std::string text = path + ": " + std::strerror(error);
    if (error == EACCES || error == EPERM) {
      return {StatusCode::kPermissionDenied, "this user may not connect to " + text};
    }
    if (error == EPROTOTYPE) return invalid_argument("not a daemon's attach socket: " + text);
    return daemon_lost("no daemon listens at " + text);
  }
  socket = std::move(fd);
  return {};
}

Received receive(const UniqueFd& socket, Packet& packet, std::string& error) {
  packet = Packet();
  iovec parts[2] = {{&packet.header, sizeof(packet.header)}, {packet.body.data(), packet.body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n;
  do {
    n = ::recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kClosed;
  std::size_t num_fds = 0;
  take_descriptors(message, packet, num_fds);
  if (n == 0) return Received::kClosed;
  const auto bytes = static_cast<std::size_t>(n);
  const bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  if (bytes < sizeof(abi::WireHeader) || cut || packet.header.magic != abi::kWireMagic ||
      packet.header.bytes != bytes || packet.header.num_fds != num_fds) {
    error = "the daemon sent a malformed packet of " + std::to_string(bytes) + " bytes" +
            (cut ? " (cut)" : "") + " with " + std::to_string(num_fds) + " descriptors; its header says " +
            std::to_string(packet.header.bytes) + " bytes and " + std::to_string(packet.header.num_fds);
    packet = Packet();
    return Received::kMalformed;
  }
  packet.body_bytes = bytes - sizeof(abi::WireHeader);
  packet.num_fds = num_fds;
  return Received::kPacket;
}

Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const void* body,
            std::size_t body_bytes, const std::vector<int>& fds) {
  abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(type),
                         static_cast<std::uint16_t>(fds.size()),
                         static_cast<std::uint32_t>(sizeof(abi::WireHeader) + body_bytes), request_id};
  iovec parts[2] = {{&header, sizeof(header)}, {const_cast<void*>(body), body_bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t n;
  do {
    n = ::sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n >= 0) return {};
  const int error = errno;
  if (error == EPIPE || error == ECONNRESET || error == ENOTCONN) {
    return daemon_lost("the daemon closed the connection");
  }
  if (error == EAGAIN || error == EWOULDBLOCK) return would_block("the daemon does not read its socket");
  return errno_status("sending a request to the daemon", error);
}

bool wait_readable(const UniqueFd& socket, Deadline deadline) {
  return wait_for(socket, POLLIN | POLLRDHUP, deadline);
}

bool wait_writable(const UniqueFd& socket, Deadline deadline) {
  return wait_for(socket, POLLOUT, deadline);
}

Status refusal(const Packet& packet) {
  const auto make = [](const auto& body) -> Status {
    const StatusCode code = checked_code(static_cast<std::uint32_t>(body.status));
    // A refusal can't be OK, whatever it says.
    return {code == StatusCode::kOk ? StatusCode::kInternal : code,
            std::string(body.text, abi::text_length(body.text))};
  };
  abi::Refused refused;
  abi::Goodbye goodbye;
  if (packet.type() == abi::AttachType::kRefused && packet.read(refused)) return make(refused);
  if (packet.type() == abi::AttachType::kGoodbye && packet.read(goodbye)) return make(goodbye);
  return internal_error("the daemon answered with message type " + std::to_string(packet.header.type) +
                        " of " + std::to_string(packet.body_bytes) +
                        " bytes, which does not fit the request");
}

}  // namespace epd::client
