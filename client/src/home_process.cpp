#include "home_process.h"

#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <new>

namespace epd::client {
namespace {

// The kernel maps a whole page.
constexpr std::size_t kBytes = sizeof(std::atomic<int>);

}  // namespace

Status HomeProcess::make(HomeProcess& out) {
  void* const page = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return errno_status("mmap");
  out.mark_ = new (page) std::atomic<int>(1);
  out.pid_ = ::getpid();
  if (::madvise(page, kBytes, MADV_WIPEONFORK) != 0) return errno_status("madvise(MADV_WIPEONFORK)");
  return {};
}

HomeProcess::~HomeProcess() {
  if (mark_ != nullptr) ::munmap(mark_, kBytes);
}

}  // namespace epd::client
