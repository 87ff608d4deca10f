// A CUDA device as a session uses it, through the driver's functions.
#include "common/gpu_uuid.h"
#include "cuda_driver.h"
#include "cuda_memory.h"
#include "device.h"
#include "stream_kernels.h"

#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace epd::client {
namespace {

struct VisibleGpu {
  CUdevice device = 0;
  abi::GpuUuid uuid{};
};

Status find_visible(const CudaDriver& driver, std::vector<VisibleGpu>& out) {
  int count = 0;
  CUresult error = driver.cuInit(0);
  if (error == CUDA_SUCCESS) error = driver.cuDeviceGetCount(&count);
  // CUDA_VISIBLE_DEVICES may be empty. Then no device is visible, which is no error here.
  if (error == CUDA_ERROR_NO_DEVICE) error = CUDA_SUCCESS;
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "starting CUDA's driver");
  for (int i = 0; i < count; ++i) {
    VisibleGpu gpu;
    CUuuid uuid{};
    error = driver.cuDeviceGet(&gpu.device, i);
    if (error == CUDA_SUCCESS) error = driver.cuDeviceGetUuid(&uuid, gpu.device);
    if (error != CUDA_SUCCESS)
      return cuda_status(driver, error, "looking at CUDA device " + std::to_string(i));
    static_assert(sizeof(uuid) == sizeof(gpu.uuid));
    std::memcpy(gpu.uuid.data(), &uuid, sizeof(uuid));
    out.push_back(gpu);
  }
  return {};
}

Status find_device(const CudaDriver& driver, const abi::Welcome& welcome, CUdevice& out) {
  std::vector<VisibleGpu> gpus;
  Status status = find_visible(driver, gpus);
  if (!status.ok()) return status;
  std::string visible;
  for (const VisibleGpu& gpu : gpus) {
    if (gpu.uuid == welcome.device_uuid) {
      out = gpu.device;
      return {};
    }
    visible += (visible.empty() ? "" : ", ") + uuid_text(gpu.uuid);
  }
  return invalid_argument("device " + std::string(welcome.device, abi::text_length(welcome.device)) + " is " +
                          uuid_text(welcome.device_uuid) +
                          ", which this process does not see (CUDA_VISIBLE_DEVICES?); visible: " +
                          (visible.empty() ? "none" : visible));
}

// While it lives, the thread may synchronise streams that do not capture. CUDA forbids that to all threads
// while any of them captures a graph in the default mode, and ends the capture. Copies and memory operations
// in another stream it allows (H200, CUDA 13.0).
class BesideCaptures {
 public:
  explicit BesideCaptures(const CudaDriver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~BesideCaptures() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const CudaDriver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // then the thread's
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaDriver& driver, CUdevice device) : driver_(driver), device_(device) {}
  ~CudaDevice() override;
  Status start();  // once, before anything else

  Status map(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) override;
  Status map_host(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) override;
  void unmap(std::uintptr_t address, std::size_t bytes) noexcept override;
  Allocation allocation_of(std::uintptr_t address, std::uint64_t bytes) noexcept override;
  Status export_memory(const Allocation& allocation, abi::MemoryRange& range,
                       std::vector<UniqueFd>& fds) override;
  Status has_kernels() const override { return kernels_loaded_; }
  Status check() override;
  Status check_stream(void* stream, bool& captures) override;
  Status follow_graph(void* stream, GraphEnd& out) override;
  Status call(std::uintptr_t place, const abi::PackedCall& call) override;
  Status wait(void* stream, std::uintptr_t flag) override;
  Status launch(void* stream, abi::Op op, const stream_kernels::StagedStep& step) override;
  Status make_event(DeviceEvent& out) override;
  void destroy_event(void* event) noexcept override;
  Status record(void* stream, void* event) override;
  Status wait_event(void* stream, void* event) override;
  Status write_aside(std::uintptr_t word, std::uint32_t value) override;
  Status finish_aside() override;
  Status read_aside(std::uintptr_t from, std::span<std::uint32_t> words) override;
  void synchronize() noexcept override;

 private:
  Status map_for(CUmemLocationType who, CUmemAccess_flags how, const UniqueFd& fd, std::uint64_t bytes,
                 DeviceMemory& out);
  Status choose_context();
  Status make_aside();
  Status load_kernels();
  // Makes the call with the context current.
  template <typename Call>
  Status within(const char* what, Call call) {
    const Current current(driver_, context_);
    if (current.error() != CUDA_SUCCESS) return status(current.error(), "cuCtxPushCurrent");
    return status(call(), what);
  }
  Status status(CUresult error, const char* what) const {
    return error == CUDA_SUCCESS ? Status() : cuda_status(driver_, error, what);
  }

  const CudaDriver& driver_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  bool retained_ = false;  // the context is the primary one, and was retained here
  CUstream aside_ = nullptr;
  std::optional<StreamKernels> kernels_;  // none: kernels_loaded_ has the reason
  Status kernels_loaded_;
  std::mutex graphs_mutex_;
  std::map<cuuint64_t, GraphEnd> graphs_;  // by capture, guarded by graphs_mutex_
};

Status CudaDevice::start() {
  Status status = choose_context();
  if (status.ok()) status = make_aside();
  // Loaded now, because loading a kernel later may wait for all that the context runs. MEMOP waits need no
  // kernel, so a failure is reported only to callers that need them.
  if (status.ok()) kernels_loaded_ = load_kernels();
  return status;
}

Status CudaDevice::load_kernels() {
  const Current current(driver_, context_);
  if (current.error() != CUDA_SUCCESS) return status(current.error(), "cuCtxPushCurrent");
  kernels_.emplace(driver_);
  Status loaded = kernels_->load(device_, aside_);
  if (!loaded.ok()) kernels_.reset();
  return loaded;
}

Status CudaDevice::choose_context() {
  CUcontext current = nullptr;
  CUdevice its_device = -1;
  if (driver_.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != nullptr &&
      driver_.cuCtxGetDevice(&its_device) == CUDA_SUCCESS && its_device == device_) {
    context_ = current;
    return {};
  }
  Status made = status(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  retained_ = made.ok();
  return made;
}

// The library's own stream, which unblocks the application's streams. It has the highest priority: streams of
// one priority may share a hardware queue, in which a write could stand behind the wait that it must end.
Status CudaDevice::make_aside() {
  return within("creating a stream", [&] {
    int least = 0;
    int greatest = 0;
    const CUresult error = driver_.cuCtxGetStreamPriorityRange(&least, &greatest);
    if (error != CUDA_SUCCESS) return error;
    return driver_.cuStreamCreateWithPriority(&aside_, CU_STREAM_NON_BLOCKING, greatest);
  });
}

// The process may be exiting, or the context destroyed. Then there is nothing to give back.
CudaDevice::~CudaDevice() {
  if (context_ == nullptr) return;
  {
    const Current current(driver_, context_);
    if (current.error() == CUDA_SUCCESS && aside_ != nullptr) driver_.cuStreamDestroy(aside_);
    kernels_.reset();
  }
  if (retained_) driver_.cuDevicePrimaryCtxRelease(device_);
}

Status CudaDevice::map_for(CUmemLocationType who, CUmemAccess_flags how, const UniqueFd& fd,
                           std::uint64_t bytes, DeviceMemory& out) {
  const Current current(driver_, context_);
  if (current.error() != CUDA_SUCCESS) return status(current.error(), "cuCtxPushCurrent");
  std::size_t size = 0;
  Status rounded = round_up(driver_, exportable_memory(device_), bytes, size);
  if (!rounded.ok()) return rounded;
  CUmemGenericAllocationHandle allocation = 0;
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd.get()));
  const CUresult error = driver_.cuMemImportFromShareableHandle(&allocation, descriptor,
                                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (error != CUDA_SUCCESS) return status(error, "cuMemImportFromShareableHandle of the daemon's memory");
  CUmemAccessDesc access{};
  access.location.type = who;
  access.location.id = who == CU_MEM_LOCATION_TYPE_DEVICE ? device_ : 0;
  access.flags = how;
  CUdeviceptr address = 0;
  Status mapped = map_allocation(driver_, allocation, size, access, "the daemon's memory", address);
  driver_.cuMemRelease(allocation);  // the mapping keeps the memory
  if (mapped.ok()) out = DeviceMemory(*this, address, size);
  return mapped;
}

Status CudaDevice::map(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) {
  return map_for(CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, fd, bytes, out);
}

Status CudaDevice::map_host(const UniqueFd& fd, std::uint64_t bytes, DeviceMemory& out) {
  return map_for(CU_MEM_LOCATION_TYPE_HOST, CU_MEM_ACCESS_FLAGS_PROT_READ, fd, bytes, out);
}

// Needs no context. If it fails, the driver or the context is gone, and the mapping with it.
void CudaDevice::unmap(std::uintptr_t address, std::size_t bytes) noexcept {
  unmap_allocation(driver_, address, bytes);
}

Allocation CudaDevice::allocation_of(std::uintptr_t address, std::uint64_t bytes) noexcept {
  const Current current(driver_, context_);
  return current.error() == CUDA_SUCCESS ? client::allocation_of(driver_, address, bytes) : Allocation();
}

Status CudaDevice::export_memory(const Allocation& allocation, abi::MemoryRange& range,
                                 std::vector<UniqueFd>& fds) {
  const BesideCaptures beside(driver_);
  const Current current(driver_, context_);
  if (current.error() != CUDA_SUCCESS) return status(current.error(), "cuCtxPushCurrent");
  return client::export_memory(driver_, device_, allocation, range, fds);
}

// Other queries of a stream, for example cuStreamQuery, would end a capture of the application's.
Status CudaDevice::check() {
  bool captures = false;
  return check_stream(aside_, captures);
}

// This query is allowed in every state of the stream.
Status CudaDevice::check_stream(void* stream, bool& captures) {
  CUstreamCaptureStatus capturing{};
  Status status = within("cuStreamIsCapturing", [&] {
    return driver_.cuStreamIsCapturing(static_cast<CUstream>(stream), &capturing);
  });
  captures = capturing == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return status;
}

Status CudaDevice::follow_graph(void* stream, GraphEnd& out) {
  CUstreamCaptureStatus capturing{};
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* edges = nullptr;  // the driver refuses to leave them out
  std::size_t num_nodes = 0;
  Status did = within("cuStreamGetCaptureInfo", [&] {
    return driver_.cuStreamGetCaptureInfo(static_cast<CUstream>(stream), &capturing, &id, &graph, &nodes,
                                          &edges, &num_nodes);
  });
  if (!did.ok()) return did;
  const std::lock_guard lock(graphs_mutex_);
  std::erase_if(graphs_, [](const auto& known) { return known.second->load(); });
  if (const auto known = graphs_.find(id); known != graphs_.end()) {
    out = known->second;
    return {};
  }
  using Ended = std::shared_ptr<std::atomic<bool>>;
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  auto told = std::make_unique<Ended>(ended);
  const CUhostFn tell = [](void* given) {
    const std::unique_ptr<Ended> its(static_cast<Ended*>(given));
    (*its)->store(true);
  };
  CUuserObject object = nullptr;
  did = within("cuUserObjectCreate", [&] {
    return driver_.cuUserObjectCreate(&object, told.get(), tell, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  });
  if (!did.ok()) return did;
  [[maybe_unused]] Ended* const given = told.release();  // the object has it
  did = within("cuGraphRetainUserObject",
               [&] { return driver_.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE); });
  if (!did.ok()) {
    driver_.cuUserObjectRelease(object, 1);
    return did;
  }
  graphs_.emplace(id, ended);
  out = ended;
  return {};
}

Status CudaDevice::call(std::uintptr_t place, const abi::PackedCall& call) {
  return within("cuMemcpyHtoDAsync",
                [&] { return driver_.cuMemcpyHtoDAsync(place, &call, sizeof(call), aside_); });
}

Status CudaDevice::wait(void* stream, std::uintptr_t flag) {
  return within("cuStreamWaitValue32", [&] {
    return driver_.cuStreamWaitValue32(static_cast<CUstream>(stream), flag, 1, CU_STREAM_WAIT_VALUE_GEQ);
  });
}

Status CudaDevice::launch(void* stream, abi::Op op, const stream_kernels::StagedStep& step) {
  return within(
      stream_kernels::kKernelTitles[stream_kernels::kernel_of(op, stream_kernels::Copying::kNothing)],
      [&] { return kernels_->launch(static_cast<CUstream>(stream), op, step); });
}

// Interprocess, so that an application can hand it on to other processes of its own.
Status CudaDevice::make_event(DeviceEvent& out) {
  CUevent event = nullptr;
  Status made = within("cuEventCreate", [&] {
    return driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
  });
  if (made.ok()) out = DeviceEvent(*this, event);
  return made;
}

// If it fails, the driver or the context is gone, and the event with it.
void CudaDevice::destroy_event(void* event) noexcept {
  driver_.cuEventDestroy(static_cast<CUevent>(event));
}

Status CudaDevice::record(void* stream, void* event) {
  return within("cuEventRecord", [&] {
    return driver_.cuEventRecord(static_cast<CUevent>(event), static_cast<CUstream>(stream));
  });
}

Status CudaDevice::wait_event(void* stream, void* event) {
  return within("cuStreamWaitEvent", [&] {
    return driver_.cuStreamWaitEvent(static_cast<CUstream>(stream), static_cast<CUevent>(event), 0);
  });
}

Status CudaDevice::write_aside(std::uintptr_t word, std::uint32_t value) {
  return within("cuStreamWriteValue32", [&] {
    return driver_.cuStreamWriteValue32(aside_, word, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  });
}

Status CudaDevice::finish_aside() {
  const BesideCaptures beside(driver_);
  return within("cuStreamSynchronize", [&] { return driver_.cuStreamSynchronize(aside_); });
}

Status CudaDevice::read_aside(std::uintptr_t from, std::span<std::uint32_t> words) {
  Status copied = within("cuMemcpyDtoHAsync", [&] {
    return driver_.cuMemcpyDtoHAsync(words.data(), from, words.size_bytes(), aside_);
  });
  return copied.ok() ? finish_aside() : copied;
}

void CudaDevice::synchronize() noexcept {
  const Current current(driver_, context_);
  if (current.error() == CUDA_SUCCESS) driver_.cuCtxSynchronize();
}

}  // namespace

Status visible_gpus(std::vector<abi::GpuUuid>& out) {
  const CudaDriver* driver = nullptr;
  Status status = load_cuda_driver(driver);
  if (!status.ok()) return status;
  std::vector<VisibleGpu> gpus;
  status = find_visible(*driver, gpus);
  for (const VisibleGpu& gpu : gpus) out.push_back(gpu.uuid);
  return status;
}

Status open_cuda_device(const abi::Welcome& welcome, std::unique_ptr<Device>& out) {
  const CudaDriver* driver = nullptr;
  Status status = load_cuda_driver(driver);
  if (!status.ok()) return status;
  CUdevice device = 0;
  status = find_device(*driver, welcome, device);
  if (!status.ok()) return status;
  auto opened = std::make_unique<CudaDevice>(*driver, device);
  status = opened->start();
  if (!status.ok()) return status;
  out = std::move(opened);
  return {};
}

}  // namespace epd::client
