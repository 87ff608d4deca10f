// Checks of a descriptor that a client sent. A call that asks a file system (fstat of a file on FUSE) could
// be delayed by the client for as long as it likes. So no such call is made before the file is known to be a
// memfd.
#include "device/memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace epd::device {
namespace {

constexpr const char* kAllowedHost =
    "; allowed: a memfd (memfd_create, MFD_ALLOW_SEALING) with F_SEAL_SHRINK, open for reading and writing";
constexpr const char* kAllowedCuda =
    "; allowed: what cuMemExportToShareableHandle gives for an allocation of cuMemCreate on this rank's GPU";

Status refused(const std::string& what, const char* allowed) {
  return invalid_argument(what + allowed);
}

Status check_host_memory(int fd, std::uint64_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) return refused("is no memfd", kAllowedHost);
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) != O_RDWR) return refused("is not open for both", kAllowedHost);
  if ((seals & F_SEAL_SHRINK) == 0)
    return refused("has seals " + std::to_string(seals) + ", so it may become shorter", kAllowedHost);
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0)
    return refused("has seals " + std::to_string(seals) + ", which forbid writing", kAllowedHost);
  struct statfs system {};
  // A huge page that has been punched out may not come back. Touching it would then raise SIGBUS.
  if (::fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC)
    return refused("is not of ordinary pages (MFD_HUGETLB?)", kAllowedHost);
  struct stat info {};
  if (::fstat(fd, &info) != 0) return errno_status("fstat");
  if (static_cast<std::uint64_t>(info.st_size) >= bytes) return {};
  return invalid_argument("has " + std::to_string(info.st_size) + " bytes; needed: " + std::to_string(bytes));
}

Status check_cuda_memory(int fd) {
  if (::fcntl(fd, F_GET_SEALS) >= 0) return {};  // a driver for tests exports memory as a memfd
  struct statx info {};
  // AT_STATX_DONT_SYNC: the server of the file is not asked.
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &info) != 0)
    return refused("is of no known kind", kAllowedCuda);
  const auto type = info.stx_mode & S_IFMT;
  if (type == S_IFCHR || type == 0) return {};
  return refused("is an ordinary file, pipe or socket", kAllowedCuda);
}

}  // namespace

Status check_client_memory(const DeviceName& device, int fd, std::uint64_t bytes) {
  return device.kind == abi::DeviceKind::kHost ? check_host_memory(fd, bytes) : check_cuda_memory(fd);
}

}  // namespace epd::device
