#include "system_calls.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <string>
#include <system_error>

namespace epd::supervisor {
namespace {

Status refused(const char* call, int error) {
  return Status(StatusCode::kUnsupported,
                std::string(call) + " is refused: " + std::generic_category().message(error) +
                    "; needed: Linux 5.9 or later, and no sandbox or seccomp filter that refuses it");
}

}  // namespace

Status check_system_calls() {
  const int self = static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
  if (self < 0) return refused("pidfd_open", errno);
  ::close(self);
  if (::accept4(-1, nullptr, nullptr, SOCK_CLOEXEC) < 0 && errno != EBADF) return refused("accept4", errno);
  return {};
}

}  // namespace epd::supervisor
