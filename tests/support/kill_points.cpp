#include "support/kill_points.h"

#include "common/signal.h"
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

// The other system calls change nothing but the caller: its heap, its signals, clocks, who has the core.
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
    {SYS_accept4, "accept"},
    {SYS_getsockopt, "getsockopt"},
    {SYS_socketpair, "socketpair"},
    {SYS_memfd_create, "memfd_create"},
    {SYS_ftruncate, "ftruncate"},
    {SYS_epoll_ctl, "epoll_ctl"},
    {SYS_openat, "openat"},
    {SYS_shutdown, "shutdown"},
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
bool next_stop(pid_t pid, double end, int& status, const std::function<bool()>& over = nullptr) {
  for (int looks = 0;; ++looks) {
    siginfo_t info{};
    const int result = ::waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED | WEXITED | WNOHANG | WNOWAIT);
    if (result != 0) return false;
    if (info.si_pid == pid) {
      if (info.si_code != CLD_TRAPPED && info.si_code != CLD_STOPPED) return false;
      return ::waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status);
    }
    if (now_s() > end || (over && over())) return false;
    if (looks < 500) {
      ::sched_yield();
    } else {
      sleep_ms(1);
    }
  }
}

// Names the stops of system calls and counts them.
class Stops {
 public:
  // At a stop for a system call: whether it counts.
  bool counts(pid_t pid) {
    __ptrace_syscall_info info{};
    ::ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(info), &info);
    entry_ = info.op == PTRACE_SYSCALL_INFO_ENTRY;
    if (entry_) {
      const char* name = name_of(info.entry.nr);
      call_ = name == nullptr ? "" : name + std::string(" #") + std::to_string(++seen_[name]);
    }
    if (call_.empty()) return false;
    ++count_;
    return true;
  }
  int count() const { return count_; }  // of the stops so far
  std::string name() const { return (entry_ ? "before " : "after ") + call_; }

 private:
  std::map<std::string, int> seen_;
  std::string call_;  // that was entered last; "" = one that does not count
  bool entry_ = false;
  int count_ = 0;
};

constexpr int kCallStop = SIGTRAP | 0x80;

}  // namespace

void begin_stretch() {
  ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
  ::raise(SIGSTOP);
}

void end_stretch() {
  ::raise(SIGSTOP);
}

namespace {

std::optional<std::string> kill_where(pid_t pid, const std::function<bool(const Stops& stops)>& there,
                                      double seconds) {
  const double end = now_s() + seconds;
  int status = 0;
  if (!next_stop(pid, end, status)) return std::nullopt;
  if (::ptrace(PTRACE_SETOPTIONS, pid, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) != 0)
    return std::nullopt;
  Stops stops;
  for (int deliver = 0;;) {
    if (::ptrace(PTRACE_SYSCALL, pid, nullptr, deliver) != 0 || !next_stop(pid, end, status))
      return std::nullopt;
    const int signal = WSTOPSIG(status);
    deliver = signal == kCallStop ? 0 : signal;
    if (signal == SIGSTOP) {  // end_stretch()
      ::ptrace(PTRACE_DETACH, pid, nullptr, 0);
      return std::nullopt;
    }
    if (signal != kCallStop || !stops.counts(pid) || !there(stops)) continue;
    send_signal(pid, SIGKILL);
    return stops.name();
  }
}

}  // namespace

std::optional<std::string> kill_at(pid_t pid, int n, double seconds) {
  return kill_where(
      pid, [n](const Stops& stops) { return stops.count() == n + 1; }, seconds);
}

bool kill_at(pid_t pid, const std::string& name, double seconds) {
  return kill_where(
             pid, [&name](const Stops& stops) { return stops.name() == name; }, seconds)
      .has_value();
}

std::optional<std::string> kill_unasked(pid_t pid, int n, const std::function<bool()>& over, double seconds) {
  const double end = now_s() + seconds;
  if (::ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACESYSGOOD) != 0) return std::nullopt;
  ::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr);
  Stops stops;
  int status = 0;
  while (next_stop(pid, end, status, over)) {
    const int signal = WSTOPSIG(status);
    const bool event = (status >> 16) != 0;  // the interruption itself
    if (signal == kCallStop && stops.counts(pid) && stops.count() == n + 1) {
      send_signal(pid, SIGKILL);
      return stops.name();
    }
    if (::ptrace(PTRACE_SYSCALL, pid, nullptr, event || signal == kCallStop ? 0 : signal) != 0) break;
  }
  ::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr);
  if (next_stop(pid, now_s() + 5, status)) ::ptrace(PTRACE_DETACH, pid, nullptr, 0);
  return std::nullopt;
}

}  // namespace epd::test
