// R rank processes that this process forks, and the memory that they share.
#pragma once

#include <sys/types.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace epd::kit {

// Anonymous zero-filled memory, shared with the processes that are forked after it was made.
class SharedBytes {
 public:
  SharedBytes() = default;
  explicit SharedBytes(std::size_t bytes);  // throws ToolError; pages come when touched
  SharedBytes(SharedBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  SharedBytes& operator=(SharedBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedBytes();

  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// All-zero bytes must be a valid T.
template <typename T>
class SharedArray {
 public:
  static_assert(std::is_trivially_destructible_v<T>);
  SharedArray() = default;
  explicit SharedArray(std::size_t count) : bytes_(count * sizeof(T)), count_(count) {}

  T* data() const { return static_cast<T*>(bytes_.data()); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::span<T> span() const { return {data(), count_}; }

 private:
  SharedBytes bytes_;
  std::size_t count_ = 0;
};

// R rank processes that this process forks, and what they share.

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
  // Like barrier(), but all ranks return within about a microsecond of one another: a second barrier follows
  // in which none sleeps.
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
