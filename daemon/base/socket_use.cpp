#include "base/socket_use.h"

#include "common/fd.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

namespace epd {

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
