#include "cuda_device.h"

#include "base/log.h"
#include "cuda_memory.h"
#include "proto/arena.h"
#include "proto/call_words.h"
#include "proto/link.h"
#include "worker_lane.h"

#include <unistd.h>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

namespace epd::device {

namespace {

std::function<void()>& last_word() {
  static std::function<void()> word;
  return word;
}

// After these errors the driver has stopped all work of the context. After any other, operations in flight
// may still run.
bool context_is_lost(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED: return true;
    default: return false;
  }
}

// The driver takes almost half a second to end a process that has used a GPU. Peers are told before that.
[[noreturn]] void lost(const std::string& error, CUresult result) {
  log_event(LogLevel::kError, "the GPU has failed; the engine ends", {{"error", error}});
  if (context_is_lost(result) && last_word()) last_word()();
  log_flush();
  ::_exit(abi::kExitDeviceFailed);  // no destructor may touch the context again
}

// The output of kernels' printf comes to stdout when somebody synchronises.
void show_printed(const CudaDriver& driver) {
  driver.cuStreamSynchronize(nullptr);
  std::fflush(stdout);
}

constexpr int kHighest =
    std::numeric_limits<int>::min();  // highest priority of streams; the driver clamps it

// SMs that operations never take. Clients' kernels may hold some while they wait for an operation, and the
// driver's own kernels (memset) must have somewhere to run.
constexpr std::uint32_t kSpareSms = 32;
}  // namespace

void CudaDevice::fail(const Status& status) const {
  lost(status.message(), CUDA_ERROR_UNKNOWN);
}

void cuda_must(const CudaDriver& driver, const char* what, CUresult result) {
  if (result == CUDA_SUCCESS) return;
  if (kernels::cuda::image_checks_ranges() && context_is_lost(result)) show_printed(driver);
  lost(driver.describe(what, result), result);
}

void set_last_word(std::function<void()> word) {
  last_word() = std::move(word);
}

// ---- streams

StreamPool::~StreamPool() {
  for (const auto& [priority, stream] : free_) driver_.cuStreamDestroy(stream);
}

CUstream StreamPool::take(int priority) {
  const auto free = std::find_if(free_.begin(), free_.end(),
                                 [priority](const auto& entry) { return entry.first == priority; });
  CUstream stream = nullptr;
  if (free != free_.end()) {
    stream = free->second;
    free_.erase(free);
  } else {
    cuda_must(driver_, "cuStreamCreateWithPriority",
              driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority));
  }
  return stream;
}

Result<LaneMemory> LaneMemoryPool::take(std::size_t device_bytes, std::size_t host_bytes) {
  const auto fits = std::find_if(free_.begin(), free_.end(), [&](const LaneMemory& memory) {
    return memory.device_bytes >= device_bytes && memory.host_bytes >= host_bytes;
  });
  if (fits != free_.end()) {
    const LaneMemory memory = *fits;
    free_.erase(fits);
    return memory;
  }
  LaneMemory memory{0, device_bytes, nullptr, host_bytes};
  void* host = nullptr;
  CUresult result = driver_.cuMemHostAlloc(&host, host_bytes, CU_MEMHOSTALLOC_PORTABLE);
  memory.host = static_cast<std::byte*>(host);
  if (result == CUDA_SUCCESS) result = driver_.cuMemAlloc(&memory.device, device_bytes);
  if (result == CUDA_SUCCESS) return memory;
  if (host != nullptr) driver_.cuMemFreeHost(host);
  return resource_exhausted("the GPU has no memory for a rank's workspace: " +
                            driver_.describe("cuMemAlloc", result));
}

// ---- device

Result<std::unique_ptr<Device>> CudaDevice::make(const DeviceName& name, const Clock& clock) {
  // Loading a kernel at its first launch may wait for all that is enqueued, and pairs stay enqueued until a
  // client calls.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kQueues).c_str(), 0);
  Result<DeviceFacts> facts = cuda_facts(name);
  if (!facts.ok()) return facts.status();
  Result<const CudaDriver*> loaded = cuda_driver();
  if (!loaded.ok()) return loaded.status();
  const CudaDriver& driver = **loaded;
  CUdevice number = 0;
  CUresult result = driver.cuDeviceGet(&number, static_cast<int>(name.index));
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuDeviceGet", result));
  std::unique_ptr<CudaDevice> device(new CudaDevice(driver, number, name.text(), clock));
  const std::uint32_t max_sms = facts->num_sms - std::min(kSpareSms, facts->num_sms / 2);
  if (Status status = device->start(max_sms); !status.ok()) return status;
  return std::unique_ptr<Device>(std::move(device));
}

CudaDevice::~CudaDevice() {
  for (CUstream stream : {aside_, control_}) {
    if (stream != nullptr) driver_.cuStreamDestroy(stream);
  }
}

Status CudaDevice::start(std::uint32_t max_sms) {
  const auto failed = [this](const char* what, CUresult result) {
    return driver_.refused(StatusCode::kInternal, name_ + ": ", what, result);
  };
  CUresult result = driver_.cuDevicePrimaryCtxRetain(&primary_, device_);
  if (result != CUDA_SUCCESS) return failed("cuDevicePrimaryCtxRetain", result);
  result = driver_.cuCtxSetCurrent(primary_);
  if (result != CUDA_SUCCESS) return failed("cuCtxSetCurrent", result);
  result = driver_.cuStreamCreate(&aside_, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return failed("cuStreamCreate", result);
  result = driver_.cuStreamCreateWithPriority(&control_, CU_STREAM_NON_BLOCKING, kHighest);
  if (result != CUDA_SUCCESS) return failed("cuStreamCreateWithPriority", result);
  int bytes = 0;
  result =
      driver_.cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device_);
  if (result != CUDA_SUCCESS) return failed("cuDeviceGetAttribute", result);
  max_shared_bytes_ = static_cast<std::size_t>(bytes);
  result = driver_.cuLibraryLoadData(&library_, kernels::cuda::image().data(), nullptr, nullptr, 0, nullptr,
                                     nullptr, 0);
  if (result != CUDA_SUCCESS) return failed("cuLibraryLoadData", result);
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    result = driver_.cuLibraryGetKernel(&kernels_[i], library_, kernels::cuda::kKernelNames[i]);
    if (result != CUDA_SUCCESS) return failed("cuLibraryGetKernel", result);
    result = driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          bytes - static_cast<int>(kernels::cuda::kStaticBytes), kernels_[i],
                                          device_);
    if (result != CUDA_SUCCESS) return failed("cuKernelSetAttribute", result);
  }
  Result<std::unique_ptr<LaunchProbe>> probe =
      LaunchProbe::make(driver_, primary_, kernel(kernels::cuda::kLaunchProbeKernel));
  if (!probe.ok()) return {probe.status().code(), name_ + ": " + probe.status().message()};
  probe_ = std::move(*probe);
  CUdeviceptr credits = 0;
  result = driver_.cuMemAlloc(&credits, sizeof(kernels::SmCredits));
  if (result != CUDA_SUCCESS) return failed("cuMemAlloc", result);
  shares_.open(max_sms, credits, control_);
  const kernels::SmCredits none{0, 0};
  write(shares_.credits(), &none, sizeof(none));
  return {};
}

void CudaDevice::check() {
  const CUresult state = driver_.cuStreamQuery(control_);
  if (state != CUDA_ERROR_NOT_READY) cuda_must(driver_, "cuStreamQuery", state);
}

bool CudaDevice::advance() {
  for (auto lane = leaving_.begin(); lane != leaving_.end();)
    lane = see_off(*lane) ? leaving_.erase(lane) : std::next(lane);
  probe_->watch(shares_.size() != 0 || !leaving_.empty());
  for (WorkerLane* lane : shares_.lanes()) lane->advance();
  const bool frees = retired_.advance(
      shares_.lanes(), now_ns(), [this] { return leaving_.empty() && is_idle(aside_) && is_idle(control_); });
  return frees || !leaving_.empty();
}

bool CudaDevice::is_idle(CUstream stream) const {
  const CUresult state = driver_.cuStreamQuery(stream);
  if (state == CUDA_ERROR_NOT_READY) return false;
  cuda_must(driver_, "cuStreamQuery", state);
  return true;
}

bool CudaDevice::see_off(LeavingLane& lane) {
  if (lane.pairs != nullptr && !lane.pairs->ended()) return false;
  if (lane.stream != nullptr && !is_idle(lane.stream)) return false;
  if (!is_idle(aside_)) return false;
  if (lane.calls.words != nullptr) close_calls(lane.calls.words);
  if (lane.stream != nullptr) streams_.give_back(lane.stream, lane.stream_priority);
  lane_memory_.give_back(lane.memory);
  return true;
}

// The first word says that no kernel serves the rings any more. The others release those who wait and have
// not seen that: see proto/README. The words' memory may be unmapped after this call.
void CudaDevice::close_calls(std::byte* words) {
  const CUstream stream = control_;
  const auto write = [&](std::size_t offset) {
    const auto word = reinterpret_cast<CUdeviceptr>(words + offset);
    cuda_must(driver_, "cuStreamWriteValue32", driver_.cuStreamWriteValue32(stream, word, 1, 0));
  };
  write(offsetof(abi::CallWords, closed));
  for (std::size_t flag = 0; flag < abi::kCallFlags; ++flag)
    write(offsetof(abi::CallWords, flags) + flag * sizeof(std::uint32_t));
  cuda_must(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(stream));
}

Result<std::unique_ptr<Arena>> CudaDevice::map_arena(int fd, std::uint64_t bytes) {
  return map_cuda_memory(driver_, device_, fd, bytes);
}

Result<std::unique_ptr<Arena>> CudaDevice::map_client_memory(std::span<const UniqueFd> pieces,
                                                             std::uint64_t bytes, bool here) {
  return map_cuda_client_memory(driver_, device_, pieces, bytes, here);
}

Result<std::unique_ptr<Arena>> CudaDevice::map_ipc_memory(const abi::MemoryRange& range, bool here) {
  return map_cuda_ipc_memory(driver_, device_, range, here, retired_);
}

Result<std::unique_ptr<Arena>> CudaDevice::map_results(int fd, std::uint64_t bytes) {
  return map_cuda_host_memory(driver_, device_, fd, bytes);
}

Result<std::unique_ptr<Lane>> CudaDevice::open_lane(const LaneShape& shape) {
  if (shares_.size() >= kMaxLanes) {
    return resource_exhausted(name_ + " serves " + std::to_string(shares_.size()) +
                              " ranks; allowed: " + std::to_string(kMaxLanes) + " on one GPU");
  }
  if (shares_.size() >= num_sms()) {
    return resource_exhausted(name_ + " serves " + std::to_string(shares_.size()) +
                              " ranks; allowed: one for each of its " + std::to_string(num_sms()) +
                              " SMs for operations (devices.sms), since none may wait for another's");
  }
  auto lane = std::make_unique<WorkerLane>(*this, shape);
  if (Status status = lane->allocate(); !status.ok()) return status;
  shares_.add(lane.get());
  return std::unique_ptr<Lane>(std::move(lane));
}

CUkernel CudaDevice::kernel(const char* name) const {
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    if (std::strcmp(kernels::cuda::kKernelNames[i], name) == 0) return kernels_[i];
  }
  EPD_CHECK(!"a kernel of the image");
  return nullptr;
}

void CudaDevice::read(void* to, const void* device, std::size_t bytes) {
  const CUstream stream = control_;
  cuda_must(driver_, "cuMemcpyDtoHAsync",
            driver_.cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(device), bytes, stream));
  cuda_must(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(stream));
}

void CudaDevice::copy_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                           std::size_t rows, CUstream stream) const {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = reinterpret_cast<CUdeviceptr>(device);
  copy.srcPitch = stride;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = to;
  copy.dstPitch = bytes;
  copy.WidthInBytes = bytes;
  copy.Height = rows;
  cuda_must(driver_, "cuMemcpy2DAsync", driver_.cuMemcpy2DAsync(&copy, stream));
}

void CudaDevice::read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                           std::size_t rows) {
  const CUstream stream = control_;
  copy_rows(to, device, bytes, stride, rows, stream);
  cuda_must(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(stream));
}

void CudaDevice::read_aside(void* to, const void* device, std::size_t bytes, std::size_t stride,
                            std::size_t rows, const std::uint32_t* word, std::uint32_t value) {
  copy_rows(to, device, bytes, stride, rows, aside_);
  cuda_must(driver_, "cuStreamWriteValue32",
            driver_.cuStreamWriteValue32(aside_, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

void CudaDevice::write(void* device, const void* from, std::size_t bytes) {
  const CUstream stream = control_;
  cuda_must(driver_, "cuMemcpyHtoDAsync",
            driver_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(device), from, bytes, stream));
  cuda_must(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(stream));
}

// A memset is a kernel of the driver's, which may have to wait for SMs.
void CudaDevice::clear(void* device, std::size_t bytes) {
  cuda_must(driver_, "cuMemsetD8Async",
            driver_.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(device), 0, bytes, aside_));
  cuda_must(driver_, "cuStreamSynchronize", driver_.cuStreamSynchronize(aside_));
}

Result<std::unique_ptr<Device>> make_cuda_device(const DeviceName& name, const Clock& clock) {
  return CudaDevice::make(name, clock);
}

}  // namespace epd::device
