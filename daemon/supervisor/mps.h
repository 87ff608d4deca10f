// MPS's control program, which can terminate what a process runs on the GPU. That comes before the process is
// cut off: one that ends in the middle of a kernel takes along every process on its GPU.
//
// Asking takes some ten milliseconds and may hang, so a thread of its own does it, one question after
// another. Threads: all calls from the loop's, which is also where answers arrive.
#pragma once

#include "base/clock.h"
#include "common/fd.h"
#include "loop.h"

#include <sys/types.h>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace epd::supervisor {

class MpsControl {
 public:
  struct Options {
    std::string program;               // nvidia-cuda-mps-control, by its path or to be found in PATH
    std::uint32_t timeout_ms = 1'000;  // for a whole answer, waiting for its turn included
  };
  // The text says what was done.
  using Answer = std::function<void(const Result<std::string>&)>;

  static Result<std::unique_ptr<MpsControl>> start(Loop& loop, const Clock& clock, Options options);
  ~MpsControl();  // answers what is still asked with nothing

  // `ours`: processes of this daemon on GPUs. If MPS lists none of them, it knows processes by other numbers
  // than we do (another PID namespace), and a number might be anybody's.

  // Whether work could be terminated: it answers, and lists one of ours. Else as terminate().
  void probe(std::vector<pid_t> ours, Answer answer);

  struct Target {
    pid_t pid = 0;
    UniqueFd pidfd;  // of the same process: a later one of that number is left alone
    std::vector<pid_t> ours;
    // Null, or true as soon as it has left us by itself, which is mostly because its process ends.
    std::shared_ptr<const std::atomic<bool>> left;
  };
  // One that is on its way out is left alone: MPS answers 201 then (driver 580). What remains is the time
  // between a last look and the server's turn. NOT_FOUND: MPS does not know it, so nothing of it runs, or it
  // is on its way out. DEADLINE_EXCEEDED. UNSUPPORTED: no such program. INTERNAL: what the program said
  // instead.
  void terminate(Target target, Answer answer);

 private:
  struct Question {
    bool probe = false;
    Target target;
    Answer answer;
    std::uint64_t due_ns = 0;
  };

  MpsControl(Loop& loop, const Clock& clock, Options options, UniqueFd stop)
      : loop_(loop), clock_(clock), options_(std::move(options)), stop_(std::move(stop)) {}
  void ask(Question question);
  void work();
  Result<std::string> probe_now(const Question& question) const;
  Result<std::string> terminate_now(const Question& question) const;
  Result<std::string> run(const std::string& command, std::uint64_t due_ns) const;

  Loop& loop_;
  const Clock& clock_;
  const Options options_;
  const UniqueFd stop_;  // readable when it is time to leave
  std::mutex mutex_;
  std::condition_variable asked_;
  std::deque<Question> questions_;  // guarded by mutex_
  bool stopping_ = false;           // likewise
  std::thread thread_;
};

}  // namespace epd::supervisor
