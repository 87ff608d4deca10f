#include "dial.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>

namespace epd::ctl {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
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

// Returns what follows the key in /proc/PID/status, or "" if it is not there.
std::string status_of(pid_t pid, std::string_view key) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(key))
      return line.substr(std::min(line.find_first_not_of(" \t", key.size()), line.size()));
  }
  return "";
}

// The process that listens behind a connection; 0: not seen from here.
pid_t listener(const Descriptor& connection) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return ::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 ? peer.pid : 0;
}

// The number of a process in its own namespace; 0: unknown.
std::int32_t own_number(pid_t pid) {
  const std::string line = "\t" + status_of(pid, "NSpid:");
  std::int32_t number = 0;  // the last one of the line
  const std::size_t before = line.find_last_of(" \t");
  if (before != std::string::npos)
    std::from_chars(line.data() + before + 1, line.data() + line.size(), number);
  return number;
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

Descriptor listening_process(const Descriptor& connection, std::int32_t own_pid) {
  const pid_t pid = listener(connection);
  if (pid <= 0 || own_number(pid) != own_pid) return Descriptor();
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::int32_t stopped_listener(const Descriptor& connection) {
  const pid_t pid = listener(connection);
  const std::string state = pid <= 0 ? "" : status_of(pid, "State:");
  return state.starts_with("T") || state.starts_with("t") ? pid : 0;
}

bool wait_for_exit(const Descriptor& process, steady_clock::time_point deadline) {
  pollfd entry{process.get(), POLLIN, 0};
  int ready = 0;
  do {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
    ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
  } while (ready <= 0 && steady_clock::now() < deadline);
  return ready > 0;
}

}  // namespace epd::ctl
