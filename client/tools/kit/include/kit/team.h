// R rank processes that this process forks, and what they share.
#pragma once

#include "kit/shared_array.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

namespace epd::kit {

// Lives in shared memory, zero-filled at the beginning.
struct TeamState {
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> generation;  // of the barrier; ranks sleep on it
  std::atomic<std::uint32_t> aborted;     // a rank has failed, so all waits end
  std::atomic<std::uint32_t> progress;    // set by rank 0, read by the parent
  std::atomic<std::uint32_t> error_claimed;
  std::atomic<std::uint32_t> error_written;
  char error[1024];
};

// One rank's view, in its own process.
class TeamRank {
 public:
  TeamRank(TeamState& state, std::uint32_t rank, std::uint32_t size)
      : state_(state), rank_(rank), size_(size) {}

  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }
  // Returns when all ranks have called it. Throws ToolError when a rank has failed, or after two minutes.
  void barrier();
  // The same, and all return within about a microsecond of one another: a barrier, and then one that none
  // sleeps in.
  void start_together();
  void set_progress(std::uint32_t value) { state_.progress.store(value, std::memory_order_relaxed); }

 private:
  void meet(std::chrono::microseconds yield_time);

  TeamState& state_;
  std::uint32_t rank_;
  std::uint32_t size_;
};

class Team {
 public:
  struct Options {
    std::chrono::seconds limit{600};                 // for the whole run
    std::vector<pid_t> daemons;                      // if one ends, the run ends
    std::function<void(std::uint32_t)> on_progress;  // in the parent, a few times a second
  };
  using Body = std::function<void(TeamRank&)>;

  explicit Team(std::uint32_t ranks);
  ~Team();  // kills what still runs
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Forks the ranks, runs `body` in each, and returns when all have ended well. The process must have one
  // thread. Throws ToolError with the first message of a rank, or with what happened to it.
  void run(const Body& body, const Options& options);

 private:
  void start(const Body& body);
  void wait(const Options& options);
  std::string error_text() const;

  SharedArray<TeamState> state_;
  std::uint32_t size_;
  std::vector<pid_t> running_;
};

// Shown while the team runs, on a terminal only.
class ProgressLine {
 public:
  ProgressLine(std::string label, std::uint32_t total)
      : label_(std::move(label)), total_(total), tty_(::isatty(STDERR_FILENO) == 1) {}
  ~ProgressLine() {
    if (tty_) std::fprintf(stderr, "\r\033[K");
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  void show(std::uint32_t done) const {
    if (tty_) std::fprintf(stderr, "\r%s %u/%u\033[K", label_.c_str(), done, total_);
  }

 private:
  std::string label_;
  std::uint32_t total_;
  bool tty_;
};

}  // namespace epd::kit
