#include "attach_socket.h"

#include <grp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace epd::client {
namespace {

bool wait_for(const UniqueFd& socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket.get(), events, 0};
    const timespec slice = to_timespec(deadline.remaining(std::chrono::seconds(1)));
    if (::ppoll(&entry, 1, &slice, nullptr) > 0) return true;
    if (deadline.passed()) return false;
  }
}

// Tells somebody who may not connect who may. It is empty if the socket can't be looked at.
std::string who_may(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return "";
  if ((info.st_mode & S_IWGRP) == 0 || info.st_gid == 0)
    return "; the daemon's configuration may allow it to a group: daemon.socket_group with "
           "daemon.socket_mode = \"0660\"";
  char buffer[4096];
  ::group record{};
  ::group* found = nullptr;
  ::getgrgid_r(info.st_gid, &record, buffer, sizeof(buffer), &found);
  return "; allowed: to members of group " +
         (found != nullptr ? std::string(found->gr_name) : std::to_string(info.st_gid));
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
  if (!fd.valid()) return errno_status("socket");
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  for (;;) {
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    const int error = errno;
    // EAGAIN: the daemon's backlog is full. The kernel reports no event when there is room again.
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
      return {StatusCode::kPermissionDenied, "this user may not connect to " + text + who_may(path)};
    }
    if (error == EPROTOTYPE) return invalid_argument("not a daemon's attach socket: " + text);
    return daemon_lost("no daemon listens at " + text +
                       (path == kDefaultSocket ? " (the default path; EPD_SOCKET names another)" : ""));
  }
  socket = std::move(fd);
  return {};
}

ReceiveResult receive(const UniqueFd& socket, Packet& packet, Status& error) {
  const ReceiveResult result = receive_packet(socket.get(), packet, error, true);
  if (result == ReceiveResult::kMalformed)
    error = internal_error("the daemon sent a malformed packet: " + error.message());
  return result;
}

Status check_descriptors(const Packet& packet) {
  if (packet.fds.size() == packet.header.num_fds) return {};
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return {StatusCode::kResourceExhausted, "this process has no room for the daemon's answer, which has " +
                                              std::to_string(packet.header.num_fds) +
                                              " descriptors: it may have " + std::to_string(limit.rlim_cur) +
                                              " open (RLIMIT_NOFILE)"};
}

Status send(const UniqueFd& socket, abi::AttachType type, std::uint32_t request_id, const void* body,
            std::size_t body_bytes, const FdList& fds) {
  const int error =
      transmit_packet(socket.get(), static_cast<std::uint16_t>(type), request_id, body, body_bytes, fds);
  if (error == 0) return {};
  if (error == EPIPE || error == ECONNRESET || error == ENOTCONN)
    return daemon_lost("the daemon closed the connection");
  if (error == EAGAIN || error == EWOULDBLOCK) return would_block("the daemon does not read its socket");
  if (error == EINVAL && !fds.empty()) {  // one of io_uring
    std::string numbers;
    for (const int fd : fds) numbers += (numbers.empty() ? "" : ", ") + std::to_string(fd);
    return invalid_argument("the system passes not all of the descriptors " + numbers +
                            " to another process; allowed: descriptors of memory");
  }
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
    // A refusal that says OK is INTERNAL.
    return {code == StatusCode::kOk ? StatusCode::kInternal : code,
            std::string(body.text, abi::text_length(body.text))};
  };
  const auto refused = packet.read<abi::Refused>();
  const auto goodbye = packet.read<abi::Goodbye>();
  if (type_of(packet) == abi::AttachType::kRefused && refused.ok()) return make(refused.value());
  if (type_of(packet) == abi::AttachType::kGoodbye && goodbye.ok()) return make(goodbye.value());
  return internal_error("the daemon answered with message type " + std::to_string(packet.header.type) +
                        " of " + std::to_string(packet.body_bytes) +
                        " bytes, which does not fit the request");
}

void send_detach(const UniqueFd& socket) {
  constexpr std::int64_t kDetachMs = 200;  // a slower daemon frees the ranks later
  // For the daemon's log: without this message the end of the connection looks like a death.
  if (!send(socket, abi::AttachType::kDetach, 0, nullptr, 0).ok()) return;
  const Deadline deadline = Deadline::in_ms(kDetachMs);
  while (wait_readable(socket, deadline)) {
    char packet[64];
    if (::recv(socket.get(), packet, sizeof(packet), MSG_DONTWAIT) <= 0) return;
  }
}

}  // namespace epd::client
