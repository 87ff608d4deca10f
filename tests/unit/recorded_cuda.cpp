#include "recorded_cuda.h"

#include "proto/commands.h"

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace epd::testing {
namespace {

RecordedCuda* here = nullptr;
thread_local std::vector<CUcontext> contexts;  // the last is current
constexpr std::size_t kGranularity = std::size_t{2} << 20;

std::uint32_t load(std::uintptr_t address) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).load();
}

// What epd_command does, but for its wait.
void ring(const StreamOp& op) {
  auto& words = *reinterpret_cast<abi::CommandWords*>(op.address);
  if (op.flagged) std::atomic_ref(words.flags[op.value]).store(0);
  const std::uint32_t n =
      op.num_tokens_at != 0 ? std::min(load(op.num_tokens_at), abi::kMostCommandTokens) : op.num_tokens;
  const std::uint32_t number = std::atomic_ref(words.tail).fetch_add(1);
  std::atomic_ref(words.rung[op.slot]).store(number + 1);
  if (std::atomic_ref(words.closed).load() != 0) {
    std::atomic_ref(words.flags[op.value]).store(1);
    return;
  }
  std::atomic_ref(words.commands[number % abi::kCommandSlots])
      .store(abi::pack({number, n, op.value, op.flagged, words.epoch & 0xff}));
}

bool can_end(const StreamOp& op) {
  if (op.kind == StreamOp::kWait) return static_cast<std::int32_t>(load(op.address) - op.value) >= 0;
  if (op.kind != StreamOp::kAwait) return true;
  auto& words = *reinterpret_cast<abi::CommandWords*>(op.address);
  if (std::atomic_ref(words.closed).load() != 0) return true;
  const std::uint32_t done = std::atomic_ref(words.done).load();
  return abi::has_ended(done, std::atomic_ref(words.rung[op.slot]).load());
}

Status load_recorded(const client::CudaDriver*& driver) {
  driver = &RecordedCuda::table();
  return {};
}

}  // namespace

// The functions of the table.
struct RecordedCalls {
  static CUresult answer(const char* function, bool needs_context = true) {
    if (needs_context && contexts.empty()) {
      here->mistakes_.push_back(std::string(function) + " without a context");
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    const auto found = here->failures_.find(function);
    return found != here->failures_.end() ? found->second : CUDA_SUCCESS;
  }
#define RECORDED_BEGIN(function, needs_context)         \
  const std::lock_guard<std::mutex> lock(here->mutex_); \
  if (const CUresult given = answer(function, needs_context); given != CUDA_SUCCESS) return given

  static CUresult init(unsigned) {
    RECORDED_BEGIN("cuInit", false);
    return CUDA_SUCCESS;
  }
  static CUresult error_name(CUresult error, const char** name) {
    switch (error) {
      case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
      case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
      case CUDA_ERROR_LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
      case CUDA_ERROR_INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
      default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  }
  static CUresult device_count(int* count) {
    RECORDED_BEGIN("cuDeviceGetCount", false);
    *count = static_cast<int>(here->uuids_.size());
    return CUDA_SUCCESS;
  }
  static CUresult device_get(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
  }
  static CUresult device_uuid(CUuuid* uuid, CUdevice device) {
    std::memset(uuid, here->uuids_.at(static_cast<std::size_t>(device)), sizeof(*uuid));
    return CUDA_SUCCESS;
  }
  static CUresult primary_retain(CUcontext* context, CUdevice device) {
    RECORDED_BEGIN("cuDevicePrimaryCtxRetain", false);
    *context = RecordedCuda::context_of(device);
    ++here->retained_;
    return CUDA_SUCCESS;
  }
  static CUresult primary_release(CUdevice) {
    const std::lock_guard<std::mutex> lock(here->mutex_);
    --here->retained_;
    return CUDA_SUCCESS;
  }
  static CUresult get_current(CUcontext* context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return CUDA_SUCCESS;
  }
  static CUresult get_device(CUdevice* device) {
    RECORDED_BEGIN("cuCtxGetDevice", true);
    *device = static_cast<CUdevice>(reinterpret_cast<std::uintptr_t>(contexts.back()) & 0xff);
    return CUDA_SUCCESS;
  }
  static CUresult push(CUcontext context) {
    RECORDED_BEGIN("cuCtxPushCurrent", false);
    contexts.push_back(context);
    return CUDA_SUCCESS;
  }
  static CUresult pop(CUcontext* context) {
    *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
  }
  static CUresult synchronize() {
    RECORDED_BEGIN("cuCtxSynchronize", true);
    ++here->synchronized_;
    return CUDA_SUCCESS;
  }
  static CUresult priorities(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
  }
  static CUresult granularity(std::size_t* bytes, const CUmemAllocationProp* kind,
                              CUmemAllocationGranularity_flags) {
    RECORDED_BEGIN("cuMemGetAllocationGranularity", true);
    if (kind->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      return CUDA_ERROR_INVALID_VALUE;
    *bytes = kGranularity;
    return CUDA_SUCCESS;
  }
  static CUresult import(CUmemGenericAllocationHandle* handle, void* descriptor, CUmemAllocationHandleType) {
    RECORDED_BEGIN("cuMemImportFromShareableHandle", true);
    *handle = here->next_handle_++;
    here->imported_[*handle] = ::dup(static_cast<int>(reinterpret_cast<std::uintptr_t>(descriptor)));
    return CUDA_SUCCESS;
  }
  static CUresult release(CUmemGenericAllocationHandle handle) {
    const std::lock_guard<std::mutex> lock(here->mutex_);
    ::close(here->imported_.at(handle));
    here->imported_.erase(handle);
    return CUDA_SUCCESS;
  }
  static CUresult reserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr,
                          unsigned long long) {
    RECORDED_BEGIN("cuMemAddressReserve", true);
    if (bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    void* place = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = reinterpret_cast<CUdeviceptr>(place);
    here->reserved_[*address] = bytes;
    return CUDA_SUCCESS;
  }
  static CUresult address_free(CUdeviceptr address, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(here->mutex_);
    ::munmap(reinterpret_cast<void*>(address), bytes);
    here->reserved_.erase(address);
    return CUDA_SUCCESS;
  }
  static CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t,
                      CUmemGenericAllocationHandle handle, unsigned long long) {
    RECORDED_BEGIN("cuMemMap", true);
    // No access before cuMemSetAccess; none ever behind the end of the file.
    if (::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
               here->imported_.at(handle), 0) == MAP_FAILED)
      return CUDA_ERROR_OUT_OF_MEMORY;
    here->mapped_[address] = bytes;
    return CUDA_SUCCESS;
  }
  static CUresult unmap(CUdeviceptr address, std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(here->mutex_);
    for (auto& [stream, state] : here->streams_) {
      for (const StreamOp& op : state.waiting) {
        if (op.address >= address && op.address < address + bytes)
          here->mistakes_.push_back("unmapped while a stream still has operations there");
      }
    }
    if (::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
               -1, 0) == MAP_FAILED)
      return CUDA_ERROR_OUT_OF_MEMORY;
    here->mapped_.erase(address);
    return CUDA_SUCCESS;
  }
  static CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
    RECORDED_BEGIN("cuMemSetAccess", true);
    ::mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
  }
  static CUresult stream_create(CUstream* stream, unsigned flags, int priority) {
    RECORDED_BEGIN("cuStreamCreateWithPriority", true);
    if (flags != CU_STREAM_NON_BLOCKING || priority != -5) return CUDA_ERROR_INVALID_VALUE;
    *stream = reinterpret_cast<CUstream>(0xa51de000 + here->next_handle_++);
    ++here->num_streams_;
    return CUDA_SUCCESS;
  }
  static CUresult stream_destroy(CUstream) {
    RECORDED_BEGIN("cuStreamDestroy", true);
    --here->num_streams_;
    return CUDA_SUCCESS;
  }
  static CUresult copy_out(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    std::function<void()> hook;
    {
      RECORDED_BEGIN("cuMemcpyDtoHAsync", true);
      if (!here->streams_[stream].waiting.empty()) here->mistakes_.push_back("a copy behind what waits");
      std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      hook = std::exchange(here->after_copy_, {});
    }
    if (hook) hook();
    return CUDA_SUCCESS;
  }
  static CUresult stream_synchronize(CUstream) {
    RECORDED_BEGIN("cuStreamSynchronize", true);
    return CUDA_SUCCESS;
  }
  static CUresult enqueue(const char* function, CUstream stream, const std::vector<StreamOp>& ops) {
    std::function<void(CUstream, const StreamOp&)> hook;
    {
      RECORDED_BEGIN(function, true);
      hook = here->hook_;
    }
    for (const StreamOp& op : ops) {
      if (hook) hook(stream, op);
    }
    const std::lock_guard<std::mutex> lock(here->mutex_);
    RecordedCuda::Stream& state = here->streams_[stream];
    for (const StreamOp& op : ops) {
      if (op.kind == StreamOp::kCheck) continue;
      state.all.push_back(op);
      state.waiting.push_back(op);
      ++here->num_enqueued_;
    }
    here->run_locked();
    return CUDA_SUCCESS;
  }
  static CUresult is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return enqueue("cuStreamIsCapturing", stream, {{StreamOp::kCheck, 0, 0}});
  }
  static CUresult write(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    return enqueue("cuStreamWriteValue32", stream, {{StreamOp::kWrite, address, value}});
  }
  static CUresult wait(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
    return enqueue("cuStreamWaitValue32", stream, {{StreamOp::kWait, address, value}});
  }

  static CUresult load_library(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                               CUlibraryOption*, void**, unsigned) {
    RECORDED_BEGIN("cuLibraryLoadData", false);
    if (code == nullptr) return CUDA_ERROR_INVALID_VALUE;
    ++here->num_libraries_;
    *library = reinterpret_cast<CUlibrary>(here->kernels_);
    return CUDA_SUCCESS;
  }
  static CUresult unload_library(CUlibrary) {
    const std::lock_guard<std::mutex> lock(here->mutex_);
    --here->num_libraries_;
    return CUDA_SUCCESS;
  }
  static CUresult get_kernel(CUkernel* kernel, CUlibrary, const char* name) {
    RECORDED_BEGIN("cuLibraryGetKernel", false);
    for (RecordedCuda::Kernel& each : here->kernels_) {
      if (std::strcmp(each.name, name) == 0) *kernel = reinterpret_cast<CUkernel>(&each);
    }
    return CUDA_SUCCESS;
  }
  static CUresult set_attribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice) {
    RECORDED_BEGIN("cuKernelSetAttribute", false);
    if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
      reinterpret_cast<RecordedCuda::Kernel*>(kernel)->carveout = value;
    return CUDA_SUCCESS;
  }
  template <typename T>
  static T parameter(void** parameters, int index) {
    T value;
    std::memcpy(&value, parameters[index], sizeof(value));
    return value;
  }
  static CUresult command(const char* name, CUstream stream, std::uintptr_t words, void** parameters) {
    StreamOp op{StreamOp::kRing, words, parameter<std::uint32_t>(parameters, 2), name};
    op.slot = parameter<std::uint32_t>(parameters, 1);
    op.num_tokens = parameter<std::uint32_t>(parameters, 3);
    op.num_tokens_at = parameter<std::uintptr_t>(parameters, 4);
    op.flagged = parameter<std::uint32_t>(parameters, 5) != 0;
    std::vector<StreamOp> ops = {op};
    if (parameter<std::uint32_t>(parameters, 6) != 0) {
      op.kind = StreamOp::kAwait;
      op.limit_ns = parameter<std::uint64_t>(parameters, 7);
      ops.push_back(op);
    }
    return enqueue(name, stream, ops);
  }
  static CUresult launch(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x,
                         unsigned y, unsigned z, unsigned shared_bytes, CUstream stream, void** parameters,
                         void**) {
    RecordedCuda::Kernel& kernel = *reinterpret_cast<RecordedCuda::Kernel*>(function);
    const auto first = parameter<std::uintptr_t>(parameters, 0);
    {
      RECORDED_BEGIN(kernel.name, true);
      if (grid_x * grid_y * grid_z * x * y * z != 1 || shared_bytes != 0)
        here->mistakes_.push_back(std::string(kernel.name) + " is of one thread");
      if (first == 0) {
        if (!kernel.loaded) here->loaded_.push_back(kernel.name);
        kernel.loaded = true;
        return CUDA_SUCCESS;
      }
      if (!kernel.loaded) here->mistakes_.push_back(std::string(kernel.name) + " had not been loaded");
    }
    const std::size_t index = static_cast<std::size_t>(&kernel - here->kernels_);
    if (index == 0)
      return enqueue(kernel.name, stream,
                     {{StreamOp::kWrite, first, parameter<std::uint32_t>(parameters, 1), kernel.name}});
    if (index == 1)
      return enqueue(kernel.name, stream,
                     {{StreamOp::kWait, first, parameter<std::uint32_t>(parameters, 1), kernel.name,
                       parameter<std::uint64_t>(parameters, 2)}});
    if (index == 3) return command(kernel.name, stream, first, parameters);
    if (index == 4) {
      StreamOp op{StreamOp::kAwait, first, 0, kernel.name, parameter<std::uint64_t>(parameters, 2)};
      op.slot = parameter<std::uint32_t>(parameters, 1);
      return enqueue(kernel.name, stream, {op});
    }
    const auto value = parameter<std::uint32_t>(parameters, 2);
    return enqueue(kernel.name, stream,
                   {{StreamOp::kWrite, first, value, kernel.name},
                    {StreamOp::kWait, parameter<std::uintptr_t>(parameters, 1), value, kernel.name,
                     parameter<std::uint64_t>(parameters, 3)}});
  }
};

const client::CudaDriver& RecordedCuda::table() {
  static const client::CudaDriver driver = [] {
    client::CudaDriver d;
    d.cuInit = &RecordedCalls::init;
    d.cuGetErrorName = &RecordedCalls::error_name;
    d.cuDeviceGetCount = &RecordedCalls::device_count;
    d.cuDeviceGet = &RecordedCalls::device_get;
    d.cuDeviceGetUuid = &RecordedCalls::device_uuid;
    d.cuDevicePrimaryCtxRetain = &RecordedCalls::primary_retain;
    d.cuDevicePrimaryCtxRelease = &RecordedCalls::primary_release;
    d.cuCtxGetCurrent = &RecordedCalls::get_current;
    d.cuCtxGetDevice = &RecordedCalls::get_device;
    d.cuCtxPushCurrent = &RecordedCalls::push;
    d.cuCtxPopCurrent = &RecordedCalls::pop;
    d.cuCtxSynchronize = &RecordedCalls::synchronize;
    d.cuCtxGetStreamPriorityRange = &RecordedCalls::priorities;
    d.cuMemGetAllocationGranularity = &RecordedCalls::granularity;
    d.cuMemImportFromShareableHandle = &RecordedCalls::import;
    d.cuMemRelease = &RecordedCalls::release;
    d.cuMemAddressReserve = &RecordedCalls::reserve;
    d.cuMemAddressFree = &RecordedCalls::address_free;
    d.cuMemMap = &RecordedCalls::map;
    d.cuMemUnmap = &RecordedCalls::unmap;
    d.cuMemSetAccess = &RecordedCalls::set_access;
    d.cuStreamCreateWithPriority = &RecordedCalls::stream_create;
    d.cuStreamDestroy = &RecordedCalls::stream_destroy;
    d.cuStreamSynchronize = &RecordedCalls::stream_synchronize;
    d.cuStreamIsCapturing = &RecordedCalls::is_capturing;
    d.cuStreamWriteValue32 = &RecordedCalls::write;
    d.cuStreamWaitValue32 = &RecordedCalls::wait;
    d.cuMemcpyDtoHAsync = &RecordedCalls::copy_out;
    d.cuLibraryLoadData = &RecordedCalls::load_library;
    d.cuLibraryUnload = &RecordedCalls::unload_library;
    d.cuLibraryGetKernel = &RecordedCalls::get_kernel;
    d.cuKernelSetAttribute = &RecordedCalls::set_attribute;
    d.cuLaunchKernel = &RecordedCalls::launch;
    return d;
  }();
  return driver;
}

RecordedCuda::RecordedCuda(std::vector<std::uint8_t> uuids) : uuids_(std::move(uuids)) {
  here = this;
  client::cuda_loader = &load_recorded;
}

RecordedCuda::~RecordedCuda() {
  client::cuda_loader = &client::load_cuda_driver;
  contexts.clear();
  here = nullptr;
}

void RecordedCuda::run_locked() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [stream, state] : streams_) {
      while (!state.held && !state.waiting.empty()) {
        const StreamOp op = state.waiting.front();
        if (!can_end(op)) break;
        if (op.kind == StreamOp::kRing) ring(op);
        if (op.kind == StreamOp::kWrite)
          std::atomic_ref(*reinterpret_cast<std::uint32_t*>(op.address)).store(op.value);
        state.waiting.pop_front();
        moved = true;
      }
    }
  }
}

std::vector<std::string> RecordedCuda::loaded() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return loaded_;
}
bool RecordedCuda::prefers_shared_memory(const std::string& kernel) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Kernel& each : kernels_) {
    if (each.name == kernel) return each.carveout == CU_SHAREDMEM_CARVEOUT_MAX_SHARED;
  }
  return false;
}
void RecordedCuda::pass_limits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [stream, state] : streams_) {
    if (!state.held && !state.waiting.empty() && state.waiting.front().limit_ns != 0)
      state.waiting.pop_front();
  }
  run_locked();
}

CUcontext RecordedCuda::context_of(int device) {
  return reinterpret_cast<CUcontext>(std::uintptr_t{0xc0de00} + static_cast<std::uintptr_t>(device));
}
void RecordedCuda::set_current(CUcontext context) {
  contexts.assign(context != nullptr ? 1 : 0, context);
}
CUcontext RecordedCuda::current() const {
  return contexts.empty() ? nullptr : contexts.back();
}
void RecordedCuda::on_enqueue(std::function<void(CUstream, const StreamOp&)> hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  hook_ = std::move(hook);
}
void RecordedCuda::after_next_copy(std::function<void()> hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  after_copy_ = std::move(hook);
}
void RecordedCuda::fail(const std::string& function, CUresult error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failures_[function] = error;
}
void RecordedCuda::hold(CUstream stream, bool held) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_[stream].held = held;
  run_locked();
}
void RecordedCuda::poke(std::uintptr_t address, std::uint32_t value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).store(value);
  run_locked();
}
std::vector<StreamOp> RecordedCuda::enqueued(CUstream stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = streams_.find(stream);
  return found != streams_.end() ? found->second.all : std::vector<StreamOp>();
}
std::size_t RecordedCuda::enqueued_anywhere() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_enqueued_;
}
std::size_t RecordedCuda::stuck(CUstream stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = streams_.find(stream);
  return found != streams_.end() ? found->second.waiting.size() : 0;
}
bool RecordedCuda::await_idle(CUstream stream) const {
  for (int i = 0; i < 10'000; ++i) {
    if (stuck(stream) == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}
std::size_t RecordedCuda::mapped_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [address, size] : mapped_) bytes += size;
  return bytes;
}
int RecordedCuda::retained() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return retained_;
}
int RecordedCuda::synchronized() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return synchronized_;
}
std::vector<std::string> RecordedCuda::mistakes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> all = mistakes_;
  if (!reserved_.empty()) all.push_back("addresses left reserved");
  if (!imported_.empty()) all.push_back("imported handles left");
  if (num_streams_ != 0) all.push_back("streams left");
  if (num_libraries_ != 0) all.push_back("libraries left");
  return all;
}

}  // namespace epd::testing
