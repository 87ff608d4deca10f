#include "support/kill_points.h"

#include "support/ranks.h"

#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

namespace epd::test {
namespace {

struct Call {
  std::uint64_t number;
  const char* name;
};

// What is left out changes nothing but the caller: its heap, its signals, clocks, who has the core.
constexpr auto kCalls = std::to_array<Call>({
    {SYS_socket, "socket"},
    {SYS_connect, "connect"},
    {SYS_sendmsg, "sendmsg"},
    {SYS_sendto, "sendto"},
    {SYS_recvmsg, "recvmsg"},
    {SYS_recvfrom, "recvfrom"},
    {SYS_ppoll, "ppoll"},
    {SYS_mmap, "mmap"},
    {SYS_munmap, "munmap"},
    {SYS_close, "close"},
    {SYS_eventfd2, "eventfd"},
    {SYS_fcntl, "fcntl"},
    {SYS_newfstatat, "fstatat"},
    {SYS_getrandom, "getrandom"},
    {SYS_read, "read"},
    {SYS_write, "write"},
#ifdef SYS_poll
    {SYS_poll, "poll"},
#endif
#ifdef SYS_fstat
    {SYS_fstat, "fstat"},
#endif
});

const char* name_of(std::uint64_t number) {
  const auto found =
      std::find_if(kCalls.begin(), kCalls.end(), [&](const Call& c) { return c.number == number; });
  return found == kCalls.end() ? nullptr : found->name;
}

// The next stop of the process, taken note of. False: it has ended (and is left to be reaped), or time is up.
bool next_stop(pid_t pid, double end, int& status) {
  for (int looks = 0;; ++looks) {
    siginfo_t info{};
    const int result = ::waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED | WEXITED | WNOHANG | WNOWAIT);
    if (result != 0) return false;
    if (info.si_pid == pid) {
      if (info.si_code != CLD_TRAPPED && info.si_code != CLD_STOPPED) return false;
      return ::waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status);
    }
    if (now_s() > end) return false;
    if (looks < 500) {
      ::sched_yield();
    } else {
      sleep_ms(1);
    }
  }
}

}  // namespace

void begin_stretch() {
  ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
  ::raise(SIGSTOP);
}

void end_stretch() {
  ::raise(SIGSTOP);
}

std::optional<std::string> kill_at(pid_t pid, int n, double seconds) {
  const double end = now_s() + seconds;
  int status = 0;
  if (!next_stop(pid, end, status)) return std::nullopt;
  if (::ptrace(PTRACE_SETOPTIONS, pid, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) != 0)
    return std::nullopt;
  std::map<std::string, int> seen;
  std::string call;  // that was entered and has not returned; "" = one that does not count
  int deliver = 0;
  for (int stops = 0;;) {
    if (::ptrace(PTRACE_SYSCALL, pid, nullptr, deliver) != 0 || !next_stop(pid, end, status))
      return std::nullopt;
    deliver = 0;
    if (WSTOPSIG(status) == SIGSTOP) {  // end_stretch()
      ::ptrace(PTRACE_DETACH, pid, nullptr, 0);
      return std::nullopt;
    }
    if (WSTOPSIG(status) != (SIGTRAP | 0x80)) {
      deliver = WSTOPSIG(status);
      continue;
    }
    __ptrace_syscall_info info{};
    ::ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(info), &info);
    const bool entry = info.op == PTRACE_SYSCALL_INFO_ENTRY;
    if (entry) {
      const char* name = name_of(info.entry.nr);
      call = name == nullptr ? "" : name + std::string(" #") + std::to_string(++seen[name]);
    }
    if (call.empty()) continue;
    if (stops++ == n) {
      ::kill(pid, SIGKILL);
      return (entry ? "before " : "after ") + call;
    }
  }
}

}  // namespace epd::test
