#include "fake_cuda/stream.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <thread>

namespace epd::fake_cuda {
namespace {

constexpr unsigned kYields = 32;
constexpr long kShortest_ns = 20'000;
constexpr long kLongest_ns = 200'000;

Table<Stream>& streams() {
  static auto* const table = new Table<Stream>;
  return *table;
}

struct GlobalCaptures {
  std::mutex mutex;
  std::set<Stream::Captured*> all;
};

std::atomic<std::uint64_t> next_capture{1};

GlobalCaptures& global_captures() {
  static auto* const captures = new GlobalCaptures;
  return *captures;
}

bool is_default(CUstream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

std::shared_ptr<Stream> default_stream(const std::shared_ptr<Context>& context) {
  const std::lock_guard lock(context->mutex);
  if (context->default_stream == nullptr) context->default_stream = std::make_shared<Stream>(context, true);
  return context->default_stream;
}

std::vector<std::shared_ptr<Stream>> streams_of(Context& context, bool all) {
  const std::lock_guard lock(context.mutex);
  std::vector<std::shared_ptr<Stream>> found;
  for (const auto& stream : context.streams) {
    if (all || stream->blocking()) found.push_back(stream);
  }
  if (context.default_stream != nullptr) found.push_back(context.default_stream);
  return found;
}

// Everything that is on `other` now comes before what `stream` does next.
void order_after(Stream& stream, const std::shared_ptr<Stream>& other) {
  const std::uint64_t count = other->submitted();
  if (other->done(count)) return;
  stream.submit([other, count](Stream& own) { return own.wait_until([&] { return other->done(count); }); });
}

// Counts the work of all streams that has ended.
std::atomic<std::uint64_t> progress{0};

}  // namespace

void Backoff::pause() {
  if (++looks_ <= kYields) {
    ::sched_yield();
    return;
  }
  const long wanted = kShortest_ns << std::min((looks_ - kYields) / 8, 8u);
  const timespec time{0, std::min(wanted, kLongest_ns)};
  ::nanosleep(&time, nullptr);
}

void Stream::submit(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  ++submitted_;
  if (!started_) {
    started_ = true;
    // Signals are for the program's own threads.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([self = shared_from_this()] { self->run(); }).detach();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  work_.notify_one();
}

void Stream::run() {
  ::pthread_setname_np(::pthread_self(), "fake_cuda");
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return !queue_.empty() || destroyed_.load(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const bool begins = !held() || wait_until([] { return true; });
    const bool runs = begins && device_.check() == CUDA_SUCCESS && work(*this);
    work = nullptr;
    lock.lock();
    ++completed_;
    ++progress;
    if (!runs) {
      completed_ += queue_.size();
      queue_.clear();
    }
    done_.notify_all();
  }
}

std::uint64_t Stream::submitted() {
  const std::lock_guard lock(mutex_);
  return submitted_;
}

bool Stream::done(std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  return completed_ >= count;
}

CUresult Stream::synchronise() {
  std::unique_lock lock(mutex_);
  const std::uint64_t count = submitted_;
  // A fault may come while nothing on this stream looks.
  while (completed_ < count && device_.check() == CUDA_SUCCESS) {
    done_.wait_for(lock, std::chrono::milliseconds(10), [&] { return completed_ >= count; });
  }
  return device_.check();
}

CUresult Stream::query() {
  if (const CUresult error = device_.check()) return error;
  const std::lock_guard lock(mutex_);
  return completed_ >= submitted_ ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

std::size_t Stream::pending() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(submitted_ - completed_);
}

bool Stream::fault(const std::string& why) {
  if (destroyed()) return false;
  complain(why);
  device_.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  return false;
}

void Stream::settle() {
  const std::uint64_t before = failed_looks_.load();
  Backoff backoff;
  while (pending() != 0 && !held() && failed_looks_.load() < before + 2) backoff.pause();
}

Stream::Captured::Captured(CUstreamCaptureMode mode, CUgraph into)
    : graph(into), id(next_capture.fetch_add(1)) {
  const std::lock_guard lock(global_captures().mutex);
  if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL) global_captures().all.insert(this);
}

Stream::Captured::~Captured() {
  const std::lock_guard lock(global_captures().mutex);
  global_captures().all.erase(this);
}

bool beside_captures() {
  if (thread_capture_mode != CU_STREAM_CAPTURE_MODE_GLOBAL) return true;
  const std::lock_guard lock(global_captures().mutex);
  for (Stream::Captured* const captured : global_captures().all) captured->spoiled = true;
  return global_captures().all.empty();
}

bool Stream::begin_capture(CUstreamCaptureMode mode, CUgraph into) {
  const std::lock_guard lock(mutex_);
  if (captured_ != nullptr) return false;
  captured_ = std::make_unique<Captured>(mode, into);
  return true;
}

std::unique_ptr<Stream::Captured> Stream::end_capture() {
  const std::lock_guard lock(mutex_);
  return std::move(captured_);
}

CUstreamCaptureStatus Stream::capture_status() {
  const std::lock_guard lock(mutex_);
  if (captured_ == nullptr) return CU_STREAM_CAPTURE_STATUS_NONE;
  return captured_->spoiled ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

void Stream::capture_info(CUgraph& graph, std::uint64_t& id) {
  const std::lock_guard lock(mutex_);
  graph = captured_->graph;
  id = captured_->id;
}

bool Stream::capture(const Work& work) {
  const std::lock_guard lock(mutex_);
  if (captured_ != nullptr) captured_->work.push_back(work);
  return captured_ != nullptr;
}

bool Stream::may_wait() {
  const std::lock_guard lock(mutex_);
  if (captured_ != nullptr) captured_->spoiled = true;
  return captured_ == nullptr;
}

void Stream::destroy() {
  const std::lock_guard lock(mutex_);
  destroyed_.store(true);
  work_.notify_all();
}

CUresult make_stream(const std::shared_ptr<Context>& context, bool blocking, CUstream* stream) {
  if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<Stream>(context, blocking);
  {
    const std::lock_guard lock(context->mutex);
    context->streams.push_back(made);
  }
  *stream = reinterpret_cast<CUstream>(streams().add(made));
  return CUDA_SUCCESS;
}

void destroy_stream(const std::shared_ptr<Stream>& stream) {
  streams().remove(stream.get());
  if (const std::shared_ptr<Context> context = stream->context(); context != nullptr) {
    const std::lock_guard lock(context->mutex);
    std::erase(context->streams, stream);
  }
  stream->destroy();
}

void destroy_streams(Context& context) {
  for (const auto& stream : streams_of(context, true)) destroy_stream(stream);
  const std::lock_guard lock(context.mutex);
  context.default_stream = nullptr;
}

std::shared_ptr<Stream> find_stream(CUstream stream) {
  if (!is_default(stream)) return streams().find(stream);
  const std::shared_ptr<Context> context = current_context();
  return context == nullptr ? nullptr : default_stream(context);
}

CUresult enqueue(CUstream handle, Stream::Work work) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = stream->device().check()) return error;
  const std::shared_ptr<Context> context = stream->context();
  if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (stream->capture(work)) return CUDA_SUCCESS;
  if (is_default(handle)) {
    for (const auto& other : streams_of(*context, false)) {
      if (other != stream) order_after(*stream, other);
    }
  } else if (stream->blocking()) {
    std::shared_ptr<Stream> other;
    {
      const std::lock_guard lock(context->mutex);
      other = context->default_stream;
    }
    if (other != nullptr) order_after(*stream, other);
  }
  stream->submit(std::move(work));
  return CUDA_SUCCESS;
}

void settle_streams() {
  std::vector<std::shared_ptr<Stream>> all;
  driver()->contexts.visit([&](Context& context) {
    for (auto& stream : streams_of(context, true)) all.push_back(std::move(stream));
  });
  // Twice, as a kernel may have stored a word before it began to wait.
  for (unsigned quiet = 0; quiet < 2; ++quiet) {
    const std::uint64_t before = progress.load();
    for (const auto& stream : all) stream->settle();
    if (progress.load() != before) quiet = ~0u;
  }
}

CUresult synchronise_context(Context& context) {
  for (const auto& stream : streams_of(context, true)) {
    if (const CUresult error = stream->synchronise()) return error;
  }
  return context.device.check();
}

CUresult synchronise_blocking(Context& context) {
  for (const auto& stream : streams_of(context, false)) {
    if (const CUresult error = stream->synchronise()) return error;
  }
  return context.device.check();
}

}  // namespace epd::fake_cuda
