#include "listeners.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace epd::transport {
namespace {

namespace fs = std::filesystem;

int option_of(int fd, int name) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : 0;
}

bool listens_by_tcp(int fd) {
  const int domain = option_of(fd, SO_DOMAIN);
  return (domain == AF_INET || domain == AF_INET6) && option_of(fd, SO_ACCEPTCONN) != 0;
}

}  // namespace

std::vector<Listener> listeners() {
  std::vector<Listener> found;
  std::error_code error;
  for (fs::directory_iterator entry("/proc/self/fd", error), end; !error && entry != end;
       entry.increment(error)) {
    const int fd = std::atoi(entry->path().filename().c_str());
    struct stat status {};
    if (listens_by_tcp(fd) && ::fstat(fd, &status) == 0) found.push_back({fd, status.st_ino});
  }
  return found;
}

bool is_open(const Listener& listener) {
  struct stat status {};
  return ::fstat(listener.fd, &status) == 0 && status.st_ino == listener.inode;
}

}  // namespace epd::transport
