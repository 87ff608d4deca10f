#include "dial.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>

namespace epd::ctl {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

// connect() honours it. None at all would be written as 0.
int limit_wait(int fd, steady_clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<microseconds>(deadline - steady_clock::now());
  const auto wait = std::max(left, microseconds(1000)).count();
  timeval time{};
  time.tv_sec = wait / 1'000'000;
  time.tv_usec = wait % 1'000'000;
  return ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) == 0 ? 0 : errno;
}

int connect_until(int fd, const sockaddr_un& address, steady_clock::time_point deadline) {
  int error = EINTR;  // by a stop and a continue too
  while (error == EINTR) {
    error = limit_wait(fd, deadline);
    if (error != 0) return error;
    error = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
  }
  return error;
}

}  // namespace

void Descriptor::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Dialled dial(const std::string& path, steady_clock::time_point deadline) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return {{}, ENAMETOOLONG};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return {{}, errno};
  const int error = connect_until(fd.get(), address, deadline);
  if (error != 0) return {{}, error};
  return {std::move(fd), 0};
}

bool has_ended(const Descriptor& connection) {
  pollfd entry{connection.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace epd::ctl
