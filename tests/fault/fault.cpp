#include "fault.h"

#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

namespace epd::test {

std::vector<std::pair<std::string, std::string>> patient_settings() {
  return {{"engine.max_restarts_per_minute", "1000"},
          {"engine.restart_backoff_max_ms", "20"},
          {"log.level", "\"info\""}};
}

Case fault_case(std::uint32_t num_ranks, std::uint32_t depth) {
  Case c;
  c.seed = 9000 + num_ranks;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 4;
  c.max_tokens = 16;
  c.hidden = 256;
  c.topk = 4;
  c.depth = depth;
  c.sizes = Sizes::kUneven;
  return c;
}

std::string SystemCensus::to_string() const {
  std::string text;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    text += (i == 0 ? "  supervisor: " : "  engine " + std::to_string(i - 1) + ": ") +
            processes[i].to_string() + "\n";
  }
  return text;
}

SystemCensus take_system_census(const Daemon& daemon) {
  SystemCensus census;
  census.processes.push_back(take_census(daemon.pid()));
  for (std::uint32_t i = 0; i < daemon.devices(); ++i) {
    const pid_t engine = daemon.engine(i);
    census.processes.push_back(engine > 0 ? take_census(engine) : Census{});
  }
  return census;
}

namespace {

bool same(const SystemCensus& a, const SystemCensus& b) {
  for (std::size_t i = 0; i < a.processes.size(); ++i) {
    const Census& x = a.processes[i];
    const Census& y = b.processes[i];
    if (x.fds != y.fds || x.memfds != y.memfds || x.memfd_mappings != y.memfd_mappings ||
        x.threads != y.threads)
      return false;
  }
  return true;
}

std::size_t memfds_of(const SystemCensus& system) {
  std::size_t count = 0;
  for (const Census& census : system.processes) count += census.memfds + census.memfd_mappings;
  return count;
}

constexpr int kEqualLooks = 30;  // a pause of the whole machine is one look, however long

}  // namespace

SystemCensus settled_census(const Daemon& daemon, bool with_clients) {
  if (!with_clients) {
    EXPECT_TRUE(eventually(20, [&] { return daemon.serves_nobody(); })) << "a session or a group is left";
  }
  SystemCensus census = take_system_census(daemon);
  double since = now_s();
  int looks = 0;
  eventually(8, [&] {
    const SystemCensus next = take_system_census(daemon);
    ++looks;
    if (!same(census, next)) {
      since = now_s();
      looks = 0;
    }
    census = next;
    return looks >= kEqualLooks && now_s() - since > 0.3;
  });
  return census;
}

void expect_same_census(const Daemon& daemon, const SystemCensus& before) {
  SystemCensus now;
  const bool returned = eventually(8, [&] {
    now = take_system_census(daemon);
    return same(before, now);
  });
  EXPECT_TRUE(returned) << "before:\n" << before.to_string() << "now:\n" << now.to_string();
}

std::size_t memfds_held(const Daemon& daemon) {
  return memfds_of(take_system_census(daemon));
}

std::size_t settled_memfds(const Daemon& daemon) {
  return memfds_of(settled_census(daemon));
}

bool hang_process(pid_t pid) {
#if defined(__x86_64__)
  if (::ptrace(PTRACE_ATTACH, pid, nullptr, nullptr) != 0) return false;
  int status = 0;
  user_regs_struct registers{};
  bool done =
      ::waitpid(pid, &status, __WALL) == pid && ::ptrace(PTRACE_GETREGS, pid, nullptr, &registers) == 0;
  if (done) {
    registers.orig_rax = ~0ull;  // no system call is to be begun again
    const long code = ::ptrace(PTRACE_PEEKTEXT, pid, registers.rip, nullptr);
    const long circle = (code & ~0xffffl) | 0xfeeb;  // jmp to itself
    done = ::ptrace(PTRACE_POKETEXT, pid, registers.rip, circle) == 0 &&
           ::ptrace(PTRACE_SETREGS, pid, nullptr, &registers) == 0;
  }
  ::ptrace(PTRACE_DETACH, pid, nullptr, nullptr);
  return done;
#else
  (void)pid;
  return false;
#endif
}

void expect_serves(const Daemon& daemon, std::uint32_t num_ranks, const std::string& group) {
  const Case c = fault_case(num_ranks);
  ScriptOptions options;
  options.rounds = 6;
  expect_all_ok(run_ranks(num_ranks, 60, [&](std::uint32_t rank) {
    return run_case(daemon.socket(), daemon.device(rank), group, c, rank, options);
  }));
}

}  // namespace epd::test
