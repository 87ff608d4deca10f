// Checks a descriptor that a client sent. A call that asks a file system (fstat of a file on FUSE) could be
// delayed by the client for as long as it likes. So no such call is made.
#include "device/memory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace epd::device {

Status check_client_memory(int fd) {
  const auto refused = [](const char* what) {
    return invalid_argument(std::string(what) + "; allowed: what cuMemExportToShareableHandle gives for an " +
                            "allocation of cuMemCreate on this rank's GPU");
  };
  if (::fcntl(fd, F_GET_SEALS) >= 0) return {};  // a driver for tests exports memory as a memfd
  struct statx info {};
  // AT_STATX_DONT_SYNC: the server of the file is not asked.
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &info) != 0)
    return refused("is of no known kind");
  const auto type = info.stx_mode & S_IFMT;
  if (type == S_IFCHR || type == 0) return {};
  return refused("is an ordinary file, pipe or socket");
}

}  // namespace epd::device
