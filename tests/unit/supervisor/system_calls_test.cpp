// A sandbox that refuses a system call which the daemon needs.
#include "system_calls.h"
#include "support/refused_call.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <string>

namespace epd::supervisor {
namespace {

// The daemon said that it serves, and then failed its devices (pidfd_open) or never answered (accept4).
TEST(SystemCalls, OneThatIsRefusedIsNamedAtTheStart) {
  EXPECT_EQ(check_system_calls().to_string(), "OK");
  const struct {
    long call;
    int error;
    const char* text;
  } cases[] = {{SYS_pidfd_open, EPERM, "pidfd_open is refused: Operation not permitted"},
               {SYS_pidfd_open, ENOSYS, "pidfd_open is refused: Function not implemented"},
               {SYS_accept4, EPERM, "accept4 is refused: Operation not permitted"},
               {SYS_accept4, ENOSYS, "accept4 is refused: Function not implemented"}};
  for (const auto& one : cases) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (!test::refuse_call(one.call, one.error)) ::_exit(2);
      const Status status = check_system_calls();
      if (status.code() != StatusCode::kUnsupported) ::_exit(3);
      ::_exit(status.message().starts_with(one.text) ? 0 : 4);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << one.text;
  }
}

}  // namespace
}  // namespace epd::supervisor
