#include "kit/team.h"

#include "common/signal.h"
#include "kit/error.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

namespace epd::kit {

// ---- shared array

SharedBytes::SharedBytes(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail_errno("mapping " + std::to_string(bytes) + " bytes");
  data_ = memory;
}

SharedBytes::~SharedBytes() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

// ---- team

namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kBarrierLimit{120};
constexpr std::chrono::microseconds kYieldTime{100};  // before sleeping: ranks usually arrive together
constexpr std::chrono::microseconds kAwakeTime{10'000};
constexpr std::chrono::seconds kGrace{5};  // for the other ranks, once one has failed
constexpr long kSliceNs = 100'000'000;

void futex_wait_slice(std::atomic<std::uint32_t>& word, std::uint32_t expected) {
  const timespec slice{0, kSliceNs};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void write_error(TeamState& state, const std::string& message) {
  if (state.error_claimed.exchange(1) != 0) return;
  const std::size_t length = std::min(message.size(), sizeof(state.error) - 1);
  std::memcpy(state.error, message.data(), length);
  state.error[length] = '\0';
  state.error_written.store(1);
}

void abort_team(TeamState& state, const std::string& message) {
  write_error(state, message);
  state.aborted.store(1);
  futex_wake_all(state.generation);
}

std::string describe_end(int wait_status) {
  if (WIFSIGNALED(wait_status)) return "was killed by signal " + std::to_string(WTERMSIG(wait_status));
  return "exited with status " + std::to_string(WEXITSTATUS(wait_status));
}

// A child of ours that has exited, whether reaped or not; it stays for its owner to reap.
bool has_ended(pid_t pid) {
  siginfo_t info{};
  const int rc = ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT);
  return rc != 0 || info.si_pid == pid;
}

[[noreturn]] void run_child(TeamState& state, std::uint32_t rank, std::uint32_t size,
                            const Team::Body& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int exit_code = 1;
  try {
    TeamRank self(state, rank, size);
    body(self);
    exit_code = 0;
  } catch (const std::exception& error) {
    abort_team(state, "rank " + std::to_string(rank) + ": " + error.what());
  }
  std::fflush(nullptr);
  ::_exit(exit_code);  // the parent's objects are not ours to destroy
}

}  // namespace

void TeamRank::barrier() {
  meet(kYieldTime);
}

void TeamRank::start_together() {
  meet(kYieldTime);
  meet(kAwakeTime);
}

void TeamRank::meet(std::chrono::microseconds yield_time) {
  const std::uint32_t generation = state_.generation.load();
  if (state_.arrived.fetch_add(1) + 1 == size_) {
    state_.arrived.store(0);
    state_.generation.store(generation + 1);
    futex_wake_all(state_.generation);
    return;
  }
  const auto begin = SteadyClock::now();
  while (state_.generation.load() == generation) {
    if (state_.aborted.load() != 0) fail("another rank has failed");
    const auto waited = SteadyClock::now() - begin;
    if (waited > kBarrierLimit) fail("the other ranks did not come to a barrier within 120 s");
    if (waited < yield_time) {
      ::sched_yield();
    } else {
      futex_wait_slice(state_.generation, generation);
    }
  }
}

Team::Team(std::uint32_t ranks) : state_(1), size_(ranks) {}

Team::~Team() {
  for (const pid_t pid : running_) {
    send_signal(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
}

void Team::run(const Body& body, const Options& options) {
  start(body);
  wait(options);
}

void Team::start(const Body& body) {
  std::fflush(nullptr);
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) fail_errno("fork of rank " + std::to_string(rank));
    if (pid == 0) {
      running_.clear();  // siblings are the parent's
      run_child(state_[0], rank, size_, body);
    }
    running_.push_back(pid);
  }
}

std::string Team::error_text() const {
  return state_[0].error_written.load() != 0 ? state_[0].error : "a rank failed without a message";
}

void Team::wait(const Options& options) {
  TeamState& state = state_[0];
  const auto begin = SteadyClock::now();
  SteadyClock::time_point failed_at{};
  bool failed = false;
  std::vector<pid_t> all = running_;
  auto set_failed = [&](const std::string& why) {
    if (!failed) failed_at = SteadyClock::now();
    failed = true;
    abort_team(state, why);
  };
  while (!running_.empty()) {
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      int status = 0;
      if (std::find(running_.begin(), running_.end(), all[rank]) == running_.end()) continue;
      if (::waitpid(all[rank], &status, WNOHANG) != all[rank]) continue;
      std::erase(running_, all[rank]);
      if (status != 0) set_failed("rank " + std::to_string(rank) + " " + describe_end(status));
    }
    if (!failed && std::any_of(options.daemons.begin(), options.daemons.end(), has_ended))
      set_failed("the daemon has ended");
    const auto now = SteadyClock::now();
    if (!failed && now - begin > options.limit) {
      set_failed("not finished after " + std::to_string(options.limit.count()) + " s");
    }
    if (failed && now - failed_at > kGrace) {
      for (const pid_t pid : std::exchange(running_, {})) {
        send_signal(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    }
    if (options.on_progress) options.on_progress(state.progress.load(std::memory_order_relaxed));
    const timespec nap{0, 20'000'000};
    if (!running_.empty()) ::nanosleep(&nap, nullptr);
  }
  if (failed) fail(error_text());
}

}  // namespace epd::kit
