#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>

namespace epd::client {

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Status Mapping::map(const UniqueFd& fd, std::uint64_t bytes, Access access, const char* what, Mapping& out) {
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return internal_error(std::string(what) + " from the daemon is not sealed against resizing (seals " +
                          std::to_string(seals) + "; needed: " + std::to_string(kNeeded) + ")");
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_status(std::string("fstat of ") + what, errno);
  if (static_cast<std::uint64_t>(info.st_size) < bytes) {
    return internal_error(std::string(what) + " from the daemon has " + std::to_string(info.st_size) +
                          " bytes; needed: " + std::to_string(bytes));
  }
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) {
    return errno_status("mapping " + std::to_string(bytes) + " bytes of " + what, errno);
  }
  Mapping mapping;
  mapping.data_ = data;
  mapping.bytes_ = bytes;
  out = std::move(mapping);
  return {};
}

}  // namespace epd::client
