// cuEvent* and their handles for other processes: the state of an event is two counters, in a file of
// /dev/shm if it is to be shared.
#include "fake_cuda/stream.h"

#include "common/signal.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

using namespace epd::fake_cuda;

namespace {

constexpr char kDirectory[] = "/dev/shm/";
constexpr char kPrefix[] = "epd_fake_cuda_event_";  // then the maker's process, a number

struct EventState {
  std::atomic<std::uint64_t> recorded;
  std::atomic<std::uint64_t> completed;
  std::atomic<std::int64_t> time_ns;
};

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

struct Event {
  explicit Event(bool times) : timing(times) {}
  ~Event() {
    if (shared) ::munmap(state, sizeof(EventState));
    if (!file.empty()) ::unlink(file.c_str());
    if (!shared) delete state;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  bool reached(std::uint64_t count) const {
    return state->completed.load(std::memory_order_acquire) >= count;
  }

  void completes(std::uint64_t count) {
    state->time_ns.store(now_ns());
    const std::lock_guard lock(mutex);
    std::uint64_t before = state->completed.load();
    while (before < count && !state->completed.compare_exchange_weak(before, count)) {
    }
    completed.notify_all();
  }

  EventState* state = nullptr;
  bool shared = false;
  std::string file;  // of its maker, who unlinks it
  bool timing;
  std::mutex mutex;  // not to miss the notice; other processes give none
  std::condition_variable completed;
};

Table<Event>& events() {
  static auto* const table = new Table<Event>;
  return *table;
}

// Files of processes that are gone: killed ones leave theirs.
void sweep() {
  DIR* const directory = ::opendir(kDirectory);
  if (directory == nullptr) return;
  while (const dirent* const entry = ::readdir(directory)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof(kPrefix) - 1) != 0) continue;
    const int process = std::atoi(entry->d_name + sizeof(kPrefix) - 1);
    if (process > 0 && epd::send_signal(process, 0) != 0 && errno == ESRCH)
      ::unlink((std::string(kDirectory) + entry->d_name).c_str());
  }
  ::closedir(directory);
}

void unlink_all() {
  events().visit([](Event& event) {
    if (!event.file.empty() && driver()->process == ::getpid()) ::unlink(event.file.c_str());
  });
}

EventState* map_state(const std::string& file, int flags) {
  const int fd = ::open(file.c_str(), flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return nullptr;
  void* state = MAP_FAILED;
  // Every process that gets the handle may open it, as with the true driver.
  if ((flags & O_CREAT) == 0 || (::fchmod(fd, 0666) == 0 && ::ftruncate(fd, sizeof(EventState)) == 0))
    state = ::mmap(nullptr, sizeof(EventState), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return state == MAP_FAILED ? nullptr : static_cast<EventState*>(state);
}

bool share(Event& event) {
  static std::atomic<unsigned> number{0};
  static const bool once = [] {
    sweep();
    return std::atexit(unlink_all) == 0;
  }();
  event.file =
      std::string(kDirectory) + kPrefix + std::to_string(::getpid()) + "_" + std::to_string(++number);
  event.state = map_state(event.file, O_CREAT | O_EXCL);
  event.shared = event.state != nullptr;
  return once && event.shared;
}

}  // namespace

CUresult CUDAAPI cuEventCreate(CUevent* handle, unsigned int flags) {
  if (const CUresult error = enter("cuEventCreate", Needs::kContext)) return error;
  const bool timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  const bool shares = (flags & CU_EVENT_INTERPROCESS) != 0;
  constexpr unsigned kFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (handle == nullptr || (flags & ~kFlags) != 0 || (shares && timing)) return CUDA_ERROR_INVALID_VALUE;
  const auto event = std::make_shared<Event>(timing);
  if (shares) {
    if (!share(*event)) return CUDA_ERROR_OPERATING_SYSTEM;
  } else {
    event->state = new EventState{};
  }
  *handle = reinterpret_cast<CUevent>(events().add(event));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
  if (const CUresult error = enter("cuEventDestroy", Needs::kNothing)) return error;
  return events().remove(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream) {
  return cuEventRecordWithFlags(handle, stream, CU_EVENT_RECORD_DEFAULT);
}

// External, in a graph: each launch records it when the stream gets there.
CUresult CUDAAPI cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned int flags) {
  if (const CUresult error = enter("cuEventRecord", Needs::kContext)) return error;
  const std::shared_ptr<Event> event = events().find(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Stream> its = find_stream(stream);
  if (its == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (flags == CU_EVENT_RECORD_EXTERNAL) {
    if (its->capture_status() != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, [event](Stream&) {
      event->completes(event->state->recorded.fetch_add(1) + 1);
      return true;
    });
  }
  if (flags != CU_EVENT_RECORD_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  if (!its->may_wait()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::uint64_t count = event->state->recorded.fetch_add(1) + 1;
  return enqueue(stream, [event, count](Stream&) {
    event->completes(count);
    return true;
  });
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
  if (const CUresult error = enter("cuEventQuery", Needs::kContext)) return error;
  const std::shared_ptr<Event> event = events().find(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return event->reached(event->state->recorded.load()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

// The thread sleeps, whatever the event's flags are.
CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  if (const CUresult error = enter("cuEventSynchronize", Needs::kContext)) return error;
  const std::shared_ptr<Event> event = events().find(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::uint64_t count = event->state->recorded.load();
  const auto between_looks = std::chrono::microseconds(event->shared ? 200 : 10'000);
  std::unique_lock lock(event->mutex);
  while (true) {
    {
      const std::shared_ptr<Context> context = current_context();
      if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
      if (const CUresult error = context->device.check()) return error;
    }
    if (event->reached(count)) return CUDA_SUCCESS;
    event->completed.wait_for(lock, between_looks);
  }
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent first, CUevent last) {
  if (const CUresult error = enter("cuEventElapsedTime", Needs::kContext)) return error;
  const std::shared_ptr<Event> from = events().find(first);
  const std::shared_ptr<Event> to = events().find(last);
  if (from == nullptr || to == nullptr || !from->timing || !to->timing) return CUDA_ERROR_INVALID_HANDLE;
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& event : {from, to}) {
    const std::uint64_t recorded = event->state->recorded.load();
    if (recorded == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->reached(recorded)) return CUDA_ERROR_NOT_READY;
  }
  *milliseconds = static_cast<float>(to->state->time_ns.load() - from->state->time_ns.load()) / 1e6f;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent awaited, unsigned int) {
  if (const CUresult error = enter("cuStreamWaitEvent", Needs::kContext)) return error;
  const std::shared_ptr<Event> event = events().find(awaited);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (event == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->may_wait()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::uint64_t count = event->state->recorded.load();
  if (event->reached(count)) return CUDA_SUCCESS;
  return enqueue(
      handle, [event, count](Stream& own) { return own.wait_until([&] { return event->reached(count); }); });
}

CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent shared) {
  if (const CUresult error = enter("cuIpcGetEventHandle", Needs::kContext)) return error;
  const std::shared_ptr<Event> event = events().find(shared);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (handle == nullptr || event->file.empty()) return CUDA_ERROR_INVALID_VALUE;
  std::memset(handle, 0, sizeof(*handle));
  const std::string name = event->file.substr(sizeof(kDirectory) - 1);
  if (name.size() >= sizeof(handle->reserved)) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(handle->reserved, name.data(), name.size());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenEventHandle(CUevent* opened, CUipcEventHandle handle) {
  if (const CUresult error = enter("cuIpcOpenEventHandle", Needs::kContext)) return error;
  if (opened == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::string name(handle.reserved, ::strnlen(handle.reserved, sizeof(handle.reserved)));
  // As the true driver fails where /dev/shm is another one.
  const bool ours = name.starts_with(kPrefix) && name.find('/') == std::string::npos;
  EventState* const state = ours ? map_state(kDirectory + name, 0) : nullptr;
  if (state == nullptr) return ours ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_INVALID_VALUE;
  const auto event = std::make_shared<Event>(false);
  event->state = state;
  event->shared = true;
  *opened = reinterpret_cast<CUevent>(events().add(event));
  return CUDA_SUCCESS;
}
