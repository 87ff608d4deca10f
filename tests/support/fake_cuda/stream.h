// A stream: a thread that does one thing after another. It starts with the first thing to do.
#pragma once

#include "fake_cuda/driver.h"
#include "fake_cuda/watching.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>

namespace epd::fake_cuda {

// Sleeps longer and longer, so that many waits leave two cores to others.
class Backoff {
 public:
  void pause();

 private:
  unsigned looks_ = 0;
};

// The mode that cuThreadExchangeStreamCaptureMode exchanges.
inline thread_local CUstreamCaptureMode thread_capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Whether this thread may synchronise now. If not, all captures of the global mode are spoiled.
bool beside_captures();

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // False: it waited in vain, and what comes after it on the stream is dropped.
  // It is given the stream on which it runs: work that was captured runs on others, again and again.
  using Work = std::function<bool(Stream&)>;
  struct Captured {
    Captured(CUstreamCaptureMode mode, CUgraph into);
    ~Captured();
    Captured(const Captured&) = delete;
    Captured& operator=(const Captured&) = delete;

    const CUgraph graph;
    const std::uint64_t id;  // of no other capture
    std::vector<Work> work;
    std::atomic<bool> spoiled = false;  // by a call that may not be captured, or not made meanwhile
  };

  Stream(const std::shared_ptr<Context>& context, bool blocking)
      : context_(context), device_(context->device), num_sms_(context->num_sms), blocking_(blocking) {}

  Device& device() const { return device_; }
  unsigned num_sms() const { return num_sms_; }
  bool blocking() const { return blocking_; }
  std::shared_ptr<Context> context() const { return context_.lock(); }

  // Destroyed, or its device has faulted: all waits on the stream's thread end.
  bool over() { return destroyed_.load() || device_.check() != CUDA_SUCCESS; }
  // The stream's thread no longer works for anybody: it may touch no memory any more.
  bool destroyed() const { return destroyed_.load(); }
  // Work on the stream reached for memory that the device does not reach: the device faults, and stderr says
  // why. Nothing of a destroyed stream faults, whose memory may be gone. Returns false.
  bool fault(const std::string& why);
  // A wait on the stream's thread. False: over before `satisfied`.
  template <typename Satisfied>
  bool wait_until(Satisfied satisfied) {
    Backoff backoff;
    while (held() || !satisfied()) {
      if (over()) return false;
      look_failed();
      backoff.pause();
    }
    return true;
  }

  // Counts a poll of a wait that was in vain. Two of them show that the stream's condition did not hold in
  // between.
  void look_failed() { ++failed_looks_; }
  // A test's: nothing begins, and no wait ends.
  void hold(bool held) { held_.store(held); }
  bool held() const { return held_.load(); }
  std::size_t pending();
  // Until the stream has nothing to do, or waits in vain, or is held.
  void settle();

  void submit(Work work);
  std::uint64_t submitted();
  // All that was submitted before is done. False: not within the time.
  bool done(std::uint64_t count);
  CUresult synchronise();
  CUresult query();
  void destroy();

  // ---- capture: what is enqueued becomes part of a graph. False, null: it is, or is not, capturing
  bool begin_capture(CUstreamCaptureMode mode, CUgraph into);
  std::unique_ptr<Captured> end_capture();
  CUstreamCaptureStatus capture_status();
  // For a stream that captures.
  void capture_info(CUgraph& graph, std::uint64_t& id);
  bool capture(const Work& work);
  // False: the caller waits for the stream, or for an event, and so spoils a capture.
  bool may_wait();

 private:
  void run();

  const std::weak_ptr<Context> context_;
  Device& device_;
  const unsigned num_sms_;
  const bool blocking_;
  std::atomic<bool> destroyed_{false};
  std::atomic<bool> held_{false};
  std::atomic<std::uint64_t> failed_looks_{0};
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Work> queue_;              // guarded by mutex_
  std::uint64_t submitted_ = 0;         // guarded by mutex_
  std::uint64_t completed_ = 0;         // guarded by mutex_
  bool started_ = false;                // guarded by mutex_
  std::unique_ptr<Captured> captured_;  // guarded by mutex_; null: it is not capturing
};

// Puts a new stream into the context.
CUresult make_stream(const std::shared_ptr<Context>& context, bool blocking, CUstream* stream);
void destroy_stream(const std::shared_ptr<Stream>& stream);
void destroy_streams(Context& context);

// The stream of a handle; the current context's default stream for null. Null: no such stream.
std::shared_ptr<Stream> find_stream(CUstream stream);
// As submit(), and in order with the default stream, if both are of the blocking kind.
CUresult enqueue(CUstream stream, Stream::Work work);
CUresult synchronise_context(Context& context);
// Waits until none of them continues by itself.
void settle_streams();
// A call without a stream waits for these: the default stream and the blocking ones.
CUresult synchronise_blocking(Context& context);

}  // namespace epd::fake_cuda
