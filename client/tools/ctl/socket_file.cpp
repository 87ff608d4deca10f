#include "socket_file.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace epd::ctl {
namespace {

std::string group_name(gid_t gid) {
  std::array<char, 4096> buffer{};
  ::group record{};
  ::group* found = nullptr;
  ::getgrgid_r(gid, &record, buffer.data(), buffer.size(), &found);
  return found != nullptr ? found->gr_name : std::to_string(gid);
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

bool is_stale(const std::string& path) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) return false;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const bool refused = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
                       errno == ECONNREFUSED;
  ::close(fd);
  return refused;
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

}  // namespace epd::ctl
