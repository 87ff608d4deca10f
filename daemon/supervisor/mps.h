// MPS's control program, which can terminate what a process runs on the GPU. That is done before the process
// is cut off, because a process that ends inside a kernel takes every process on its GPU along.
//
// A question takes some ten milliseconds and may hang. So a thread of its own asks, one question after
// another. All calls come from the loop's thread, and answers arrive there.
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
    std::string program;               // nvidia-cuda-mps-control, as a path or a name in PATH
    std::uint32_t timeout_ms = 1'000;  // for a whole answer, including the wait for its turn
  };
  // The text says what was done.
  using Answer = std::function<void(const Result<std::string>&)>;

  static Result<std::unique_ptr<MpsControl>> start(Loop& loop, const Clock& clock, Options options);
  ~MpsControl();  // answers nothing to open questions

  // `ours` are processes of this daemon on GPUs. If MPS lists none of them, it knows processes by other
  // numbers than this daemon does (another PID namespace). Then a number might be anybody's.

  // Whether work could be terminated: MPS answers, and lists one of `ours`. Errors are those of terminate().
  void probe(std::vector<pid_t> ours, Answer answer);

  struct Target {
    pid_t pid = 0;
    UniqueFd pidfd;  // of the same process: a later process with its number is left alone
    std::vector<pid_t> ours;
    // Null, or true as soon as the client has left by itself. It mostly does so because its process ends.
    std::shared_ptr<const std::atomic<bool>> left;
  };
  // Terminates the work of a process. A process that is about to end is left alone: MPS answers 201 then
  // (driver 580). That leaves the time between the last check and the server's turn. NOT_FOUND: MPS does not
  // know the process, so nothing of it runs, or it is about to end. DEADLINE_EXCEEDED: no answer in time.
  // UNSUPPORTED: there is no such program. INTERNAL: another answer of the program, with its text.
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
  const UniqueFd stop_;  // readable when the thread is to end
  std::mutex mutex_;
  std::condition_variable asked_;
  std::deque<Question> questions_;  // guarded by mutex_
  bool stopping_ = false;           // likewise
  std::thread thread_;
};

}  // namespace epd::supervisor
