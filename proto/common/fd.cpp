#include "common/fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstdint>

namespace epd {

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Result<UniqueFd> duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return errno_status("fcntl(F_DUPFD_CLOEXEC, " + std::to_string(fd) + ")");
  return copy;
}

Result<UniqueFd> make_eventfd() {
  UniqueFd fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd.valid()) return errno_status("eventfd");
  return fd;
}

void ring_eventfd(int fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(fd, &one, sizeof(one));
}

void ring_socket(int fd) {
  const char byte = 0;
  [[maybe_unused]] const ssize_t n = ::send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

Result<std::pair<UniqueFd, UniqueFd>> make_socketpair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return errno_status("socketpair");
  return std::pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

}  // namespace epd
