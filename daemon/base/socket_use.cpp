#include "base/socket_use.h"

#include "common/fd.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace epd {

Status make_socket_directory(const std::string& path, const std::string& option) {
  const auto parent = std::filesystem::path(path).parent_path();
  if (parent.empty()) return {};
  std::error_code error;
  std::filesystem::create_directories(parent, error);
  if (!error) return {};
  const bool denied = error == std::errc::permission_denied || error == std::errc::read_only_file_system;
  return {denied ? StatusCode::kPermissionDenied : StatusCode::kInvalidArgument,
          "directory " + parent.string() + " of " + option + " can't be made: " + error.message() +
              (denied ? "; make it as root, or name sockets in a directory of your own: daemon.socket and "
                        "daemon.control_socket (EPD_SOCKET, EPD_CONTROL_SOCKET)"
                      : "; allowed: a path in a directory that can be made")};
}

SocketUse socket_use(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return SocketUse::kUnknown;
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  // A socket of another type than the one that listens is refused with EPROTOTYPE.
  for (const int type : {SOCK_SEQPACKET, SOCK_STREAM, SOCK_DGRAM}) {
    const UniqueFd probe(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!probe.valid()) return SocketUse::kUnknown;
    if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0)
      return SocketUse::kSomebody;
    const int error = errno;
    if (error == EAGAIN || error == EINPROGRESS) return SocketUse::kSomebody;  // its queue is full
    if (error == ECONNREFUSED || error == ENOENT) return SocketUse::kNobody;
    if (error != EPROTOTYPE) break;
  }
  return SocketUse::kUnknown;
}

FileId file_at(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return {};
  return {info.st_dev, info.st_ino};
}

void remove_file(const std::string& path, const FileId& file) {
  if (file_at(path) == file) ::unlink(path.c_str());
}

}  // namespace epd
