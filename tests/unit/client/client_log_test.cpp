// libepd's lines on standard error when nobody reads it any more.
#include "log.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

namespace epd::client {
namespace {

// In a process of its own, whose standard error is a pipe without a reader. Ends it with 0.
class NobodyReads : public ::testing::Test {
 protected:
  static void begin() {
    int ends[2] = {-1, -1};
    if (::pipe(ends) != 0 || ::dup2(ends[1], STDERR_FILENO) < 0) ::_exit(10);
    ::close(ends[0]);
    ::close(ends[1]);
    log_detail::level = static_cast<int>(LogLevel::kInfo);
    std::signal(SIGPIPE, SIG_DFL);
  }
  static sigset_t only_sigpipe() {
    sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGPIPE);
    return set;
  }
  static bool is_pending() {
    sigset_t pending;
    return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
  }
  static bool is_blocked() {
    sigset_t mask;
    return ::pthread_sigmask(SIG_SETMASK, nullptr, &mask) == 0 && ::sigismember(&mask, SIGPIPE) == 1;
  }
};

TEST_F(NobodyReads, TheApplicationLivesAndKeepsItsErrnoAndItsMask) {
  const auto run = [] {
    begin();
    errno = ENOENT;
    for (int i = 0; i < 3; ++i) log_line(LogLevel::kInfo, "attached", {{"device", "host:0"}});
    ::_exit(errno != ENOENT ? 1 : is_blocked() ? 2 : is_pending() ? 3 : 0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(NobodyReads, AHandlerOfTheApplicationIsNotCalled) {
  const auto run = [] {
    begin();
    std::signal(SIGPIPE, [](int) { ::_exit(1); });
    log_line(LogLevel::kInfo, "attached", {});
    ::_exit(0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(NobodyReads, ASignalThatTheApplicationKeepsPendingStays) {
  const auto run = [] {
    begin();
    const sigset_t sigpipe = only_sigpipe();
    ::pthread_sigmask(SIG_BLOCK, &sigpipe, nullptr);
    log_line(LogLevel::kInfo, "attached", {});
    if (is_pending()) ::_exit(1);
    std::raise(SIGPIPE);
    log_line(LogLevel::kInfo, "attached", {});
    ::_exit(!is_pending() ? 2 : !is_blocked() ? 3 : 0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace epd::client
