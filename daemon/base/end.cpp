#include "base/end.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

namespace epd {
namespace {

volatile sig_atomic_t g_code = 0;

// A signal's: system calls only.
void end_now(int /*signal*/) {
  static constexpr char kText[] = "epd: the process does not end by itself, so it is ended\n";
  pollfd writable{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&writable, 1, 0) > 0) {
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  }
  ::_exit(g_code);
}

}  // namespace

void end_within(unsigned seconds, int code) {
  g_code = code;
  ::signal(SIGALRM, end_now);
  sigset_t own;
  ::sigemptyset(&own);
  ::sigaddset(&own, SIGALRM);
  ::pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  ::alarm(seconds);
}

}  // namespace epd
