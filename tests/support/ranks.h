// Ranks of a test: each is a process of its own, forked while the test has no threads.
// Nothing here keeps a thread in the test's process, and no wait is without an end.
#pragma once

#include <sys/types.h>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace epd::test {

// Thrown inside a rank; ends it with this text.
struct RankFailure {
  std::string text;
};

std::string where(const char* file, int line);

#define RANK_FAIL(text)                             \
  throw ::epd::test::RankFailure {                  \
    ::epd::test::where(__FILE__, __LINE__) + (text) \
  }
#define RANK_CHECK(condition, text)                                     \
  do {                                                                  \
    if (!(condition)) RANK_FAIL(std::string(#condition ": ") + (text)); \
  } while (0)

struct RankOutcome {
  bool ok = false;    // the body returned
  bool hung = false;  // killed by the watchdog
  int signal = 0;     // that ended it
  std::string text;   // what the body returned, or why it failed
  std::string note;   // the last note(), when it did not return
  std::string to_string() const;
};

class RankProcess {
 public:
  using Body = std::function<std::string()>;

  RankProcess() = default;
  explicit RankProcess(const Body& body);
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&& other) noexcept;
  ~RankProcess();  // kills it, if wait() has not been called

  pid_t pid() const { return pid_; }
  void kill(int signal) const;
  // Until it ends, at most `seconds`; then it is killed and the outcome says so.
  RankOutcome wait(double seconds);

 private:
  void reset();
  pid_t pid_ = -1;
  int pipe_ = -1;
  char* note_ = nullptr;  // shared page
};

// Says what this rank is about to do; shown when it hangs or is killed.
void note(const std::string& text);

// Starts a process for each of body(0..num_ranks-1).
std::vector<RankProcess> start_ranks(std::uint32_t num_ranks,
                                     const std::function<std::string(std::uint32_t)>& body);
// Runs body(0..num_ranks-1) side by side. The watchdog covers all of them together.
std::vector<RankOutcome> run_ranks(std::uint32_t num_ranks, double seconds,
                                   const std::function<std::string(std::uint32_t)>& body);
std::vector<RankOutcome> wait_all(std::vector<RankProcess>& ranks, double seconds);

// A test failure for each rank that did not return.
void expect_all_ok(const std::vector<RankOutcome>& outcomes);

double now_s();
void sleep_ms(int ms);
// Polls every few milliseconds; false after `seconds`.
bool eventually(double seconds, const std::function<bool()>& condition);

void* map_shared(std::size_t bytes);
void unmap_shared(void* memory, std::size_t bytes);

// One zero-initialised T that the test and its ranks share. Make it before forking.
template <typename T>
class Shared {
 public:
  Shared() : value_(new (map_shared(sizeof(T))) T{}) {}
  ~Shared() { unmap_shared(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// Counts arrivals of processes.
struct Gate {
  std::atomic<std::uint32_t> count;
  void arrive() { count.fetch_add(1); }
  void open() { count.store(1u << 30); }
  // Throws RankFailure after `seconds`.
  void wait_for(std::uint32_t arrivals, double seconds = 60);
  void meet(std::uint32_t arrivals) {
    arrive();
    wait_for(arrivals);
  }
};

// Ends the rounds of a group's ranks, which run on until somebody asks, with the same round on all. No rank
// ends a round without the others.
struct LastRound {
  std::atomic<bool> asked;
  std::atomic<std::uint64_t> end;  // 0: not known
  void ask() { asked = true; }
  // Each rank asks before each round whether it comes. Rank 0 settles the end before a round that no other
  // has ended.
  bool comes(std::uint32_t rank, std::uint64_t round) {
    if (rank == 0 && asked && end == 0) end = round + 1;
    return end == 0 || round < end;
  }
};

}  // namespace epd::test
