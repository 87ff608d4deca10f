#include "socket.h"

#include <grp.h>
#include <poll.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string_view>

namespace epd::ctl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string group_name(gid_t gid) {
  std::array<char, 4096> buffer{};
  ::group record{};
  ::group* found = nullptr;
  ::getgrgid_r(gid, &record, buffer.data(), buffer.size(), &found);
  return found != nullptr ? found->gr_name : std::to_string(gid);
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

std::string user_name(std::uint32_t uid) {
  std::array<char, 4096> buffer{};
  ::passwd record{};
  ::passwd* found = nullptr;
  ::getpwuid_r(uid, &record, buffer.data(), buffer.size(), &found);
  return found != nullptr ? found->pw_name : std::to_string(uid);
}

SocketFile look_at_socket(const std::string& path) {
  SocketFile file;
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    file.kind = errno == ENOENT || errno == ENOTDIR ? SocketFile::Kind::kMissing : SocketFile::Kind::kUnseen;
    file.error = std::strerror(errno);
    return file;
  }
  file.mode = info.st_mode & 07777;
  file.uid = info.st_uid;
  file.gid = info.st_gid;
  if (!S_ISSOCK(info.st_mode)) {
    file.kind = SocketFile::Kind::kOther;
  } else {
    file.kind = ::access(path.c_str(), W_OK) == 0 ? SocketFile::Kind::kUsable : SocketFile::Kind::kForbidden;
  }
  return file;
}

Knock knock(const std::string& path) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) return {ENAMETOOLONG, 0};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return {errno, 0};
  ucred peer{};
  socklen_t size = sizeof(peer);
  const bool known = ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  return {0, known ? peer.pid : 0};
}

bool is_stale(const std::string& path) {
  return knock(path).error == ECONNREFUSED;
}

std::string owner_and_mode(const SocketFile& file) {
  std::array<char, 16> mode{};
  std::snprintf(mode.data(), mode.size(), " %04o", static_cast<unsigned>(file.mode));
  return user_name(file.uid) + ":" + group_name(file.gid) + mode.data();
}

std::string how_to_get_in(const SocketFile& file, const std::string& keys) {
  const std::string you = "you are " + user_name(::geteuid()) + ": ";
  if ((file.mode & 020) != 0 && file.gid != 0)
    return you + "join group " + group_name(file.gid) + ", or use sudo";
  return you + "use sudo, or become " + user_name(file.uid) +
         "; the daemon's configuration may open it: " + keys;
}

bool is_stopped(pid_t pid) {
  const std::string state = pid <= 0 ? "" : status_of(pid, "State:");
  return state.starts_with("T") || state.starts_with("t");
}

UniqueFd listening_process(const std::string& path, std::int32_t own_pid) {
  const pid_t pid = knock(path).listener;
  if (pid <= 0 || own_number(pid) != own_pid) return UniqueFd();
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

bool wait_for_exit(const UniqueFd& process, steady_clock::time_point deadline) {
  pollfd entry{process.get(), POLLIN, 0};
  int ready = 0;
  do {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
    ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
  } while (ready <= 0 && steady_clock::now() < deadline);
  return ready > 0;
}

}  // namespace epd::ctl
