#include "common/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace epd {
namespace {

// Nobody opens it again by name (/proc/PID/fd/N), its owner neither: descriptors are passed on.
constexpr mode_t kNobody = 0;
constexpr mode_t kOwnerReads = 0400;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Boost.Interprocess maps objects with this interface.
struct FdMappable {
  int fd;
  boost::interprocess::mapping_handle_t get_mapping_handle() const { return {fd, false}; }
};

}  // namespace

Result<UniqueFd> make_sealed_memfd(const char* name, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return errno_status(std::string("memfd_create ") + name);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    const bool limited = errno == EFBIG;
    return resource_exhausted(std::string(name) + " of " + std::to_string(bytes) +
                              " bytes: " + errno_status("ftruncate").message() +
                              (limited ? "; RLIMIT_FSIZE allows no more" : ""));
  }
  if (::fchmod(fd.get(), kNobody) != 0) return errno_status("fchmod memfd");
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) return errno_status("F_ADD_SEALS");
  return fd;
}

Result<UniqueFd> reopen_read_only(int memfd) {
  const std::string path = "/proc/self/fd/" + std::to_string(memfd);
  if (::fchmod(memfd, kOwnerReads) != 0) return errno_status("fchmod memfd");
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const Status opened = fd.valid() ? Status() : errno_status("open " + path);
  if (::fchmod(memfd, kNobody) != 0) return errno_status("fchmod memfd");
  if (!opened.ok()) return opened;
  return fd;
}

Result<std::uint64_t> sealed_size(int memfd) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return invalid_argument("not sealed against resizing (seals " + std::to_string(seals) +
                            "; needed: " + std::to_string(kSizeSeals) + ")");
  }
  struct stat info {};
  if (::fstat(memfd, &info) != 0) return errno_status("fstat");
  return static_cast<std::uint64_t>(info.st_size);
}

Result<Mapping> Mapping::map(int fd, std::uint64_t bytes, Access access) {
  namespace bip = boost::interprocess;
  Mapping mapping;
  try {
    mapping.region_ = bip::mapped_region(
        FdMappable{fd}, access == Access::kReadOnly ? bip::read_only : bip::read_write, 0, bytes);
  } catch (const bip::interprocess_exception& error) {
    return errno_status("mapping " + std::to_string(bytes) + " bytes", error.get_native_error());
  }
  return mapping;
}

Status Mapping::map_over(int fd, Access access) {
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  if (::mmap(data(), size(), protection, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) return {};
  return errno_status("mapping " + std::to_string(size()) + " bytes");
}

bool Mapping::shrink_by(std::uint64_t bytes) {
  return bytes < size() && region_.shrink_by(bytes, true);
}

}  // namespace epd
