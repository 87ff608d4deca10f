#include "support/ranks.h"

#include "common/signal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <utility>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace epd::test {
namespace {

constexpr std::size_t kNoteBytes = 4096;

char* g_note = nullptr;  // of the rank that this process is

void write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
}

[[noreturn]] void run_body(const RankProcess::Body& body, int pipe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string text;
  int code = 0;
  try {
    text = body();
  } catch (const RankFailure& failure) {
    text = failure.text;
    code = 1;
  } catch (const std::exception& error) {
    text = std::string("exception: ") + error.what();
    code = 1;
  }
#ifdef __SANITIZE_ADDRESS__  // _exit() looks for no leaks
  if (code == 0 && __lsan_do_recoverable_leak_check() != 0) {
    text += " [leaks, see LeakSanitizer's report]";
    code = 1;
  }
#endif
  write_all(pipe, text);
  ::_exit(code);
}

}  // namespace

std::string where(const char* file, int line) {
  const char* name = std::strrchr(file, '/');
  return std::string(name == nullptr ? file : name + 1) + ":" + std::to_string(line) + ": ";
}

std::string RankOutcome::to_string() const {
  if (ok) return "ok: " + text;
  std::string out = hung          ? "hung and was killed"
                    : signal != 0 ? "ended by signal " + std::to_string(signal)
                                  : "failed";
  if (!text.empty()) out += ": " + text;
  if (!note.empty()) out += " [last note: " + note + "]";
  return out;
}

RankProcess::RankProcess(const Body& body) : note_(static_cast<char*>(map_shared(kNoteBytes))) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return;
  std::fflush(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::close(ends[0]);
    g_note = note_;
    // As without MPS. Under MPS CUDA gives a process so few hardware queues that streams wait for each other.
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 0);
    run_body(body, ends[1]);
  }
  ::close(ends[1]);
  pipe_ = ends[0];
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pipe_(std::exchange(other.pipe_, -1)),
      note_(std::exchange(other.note_, nullptr)) {}

RankProcess& RankProcess::operator=(RankProcess&& other) noexcept {
  if (this != &other) {
    reset();
    pid_ = std::exchange(other.pid_, -1);
    pipe_ = std::exchange(other.pipe_, -1);
    note_ = std::exchange(other.note_, nullptr);
  }
  return *this;
}

RankProcess::~RankProcess() {
  reset();
}

void RankProcess::reset() {
  if (pid_ > 0) {
    send_signal(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (pipe_ >= 0) ::close(pipe_);
  if (note_ != nullptr) unmap_shared(note_, kNoteBytes);
  pid_ = pipe_ = -1;
  note_ = nullptr;
}

void RankProcess::kill(int signal) const {
  if (pid_ > 0) send_signal(pid_, signal);
}

RankOutcome RankProcess::wait(double seconds) {
  RankOutcome outcome;
  if (pid_ <= 0) {
    outcome.text = "was not started, or has been waited for";
    return outcome;
  }
  const double end = now_s() + seconds;
  char buffer[4096];
  for (;;) {
    const double left = end - now_s();
    pollfd entry{pipe_, POLLIN, 0};
    const int ready = ::poll(&entry, 1, left > 0 ? static_cast<int>(left * 1000) + 1 : 0);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      outcome.hung = true;
      send_signal(pid_, SIGKILL);
      break;
    }
    const ssize_t n = ::read(pipe_, buffer, sizeof(buffer));
    if (n <= 0) break;
    outcome.text.append(buffer, static_cast<std::size_t>(n));
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  outcome.ok = !outcome.hung && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (!outcome.ok) outcome.note = note_;
  pid_ = -1;
  reset();
  return outcome;
}

void note(const std::string& text) {
  if (g_note == nullptr) return;
  const std::size_t n = std::min(text.size(), kNoteBytes - 1);
  std::memcpy(g_note, text.data(), n);
  g_note[n] = '\0';
}

std::vector<RankOutcome> wait_all(std::vector<RankProcess>& ranks, double seconds) {
  const double end = now_s() + seconds;
  std::vector<RankOutcome> outcomes;
  outcomes.reserve(ranks.size());
  for (RankProcess& rank : ranks) outcomes.push_back(rank.wait(end - now_s()));
  return outcomes;
}

std::vector<RankProcess> start_ranks(std::uint32_t num_ranks,
                                     const std::function<std::string(std::uint32_t)>& body) {
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank)
    ranks.emplace_back([&body, rank] { return body(rank); });
  return ranks;
}

std::vector<RankOutcome> run_ranks(std::uint32_t num_ranks, double seconds,
                                   const std::function<std::string(std::uint32_t)>& body) {
  std::vector<RankProcess> ranks = start_ranks(num_ranks, body);
  return wait_all(ranks, seconds);
}

void expect_all_ok(const std::vector<RankOutcome>& outcomes) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank)
    EXPECT_TRUE(outcomes[rank].ok) << "rank " << rank << " " << outcomes[rank].to_string();
}

double now_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void sleep_ms(int ms) {
  timespec left{ms / 1000, static_cast<long>(ms % 1000) * 1'000'000};
  while (::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

bool eventually(double seconds, const std::function<bool()>& condition) {
  const double end = now_s() + seconds;
  while (!condition()) {
    if (now_s() > end) return condition();
    sleep_ms(2);
  }
  return true;
}

void* map_shared(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void unmap_shared(void* memory, std::size_t bytes) {
  ::munmap(memory, bytes);
}

void Gate::wait_for(std::uint32_t arrivals, double seconds) {
  if (!eventually(seconds, [&] { return count.load() >= arrivals; }))
    throw RankFailure{"gate: " + std::to_string(count.load()) + " of " + std::to_string(arrivals) +
                      " arrived in " + std::to_string(seconds) + " s"};
}

}  // namespace epd::test
