// cuMem*: virtual memory, device memory and pinned host memory.
#include "fake_cuda/memory.h"
#include "fake_cuda/stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

using namespace epd::fake_cuda;

namespace {

constexpr char kLinkPrefix[] = "/memfd:epd_fake_cuda_device_";
constexpr char kHostLink[] = "/memfd:epd_fake_cuda_host";
constexpr int kNoMemory = -2;
constexpr std::size_t kDeviceBytes = std::size_t{141} << 30;

Table<Allocation>& allocations() {
  static auto* const table = new Table<Allocation>;
  return *table;
}

std::shared_ptr<Allocation> find(CUmemGenericAllocationHandle handle) {
  return allocations().find(pointer(handle));
}

CUresult check(const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  const bool on_device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!on_device && prop->location.type != CU_MEM_LOCATION_TYPE_HOST_NUMA) return CUDA_ERROR_INVALID_VALUE;
  if (on_device && driver()->device(prop->location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (!on_device && prop->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
  if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

// The device whose memory a descriptor is, as this process numbers it; kHostMemory, kNoMemory. A device that
// this process does not see counts as the first.
int device_of(int fd) {
  char path[64];
  char link[128];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(path, link, sizeof(link) - 1);
  if (length <= 0) return kNoMemory;
  link[length] = '\0';
  if (std::strncmp(link, kHostLink, sizeof(kHostLink) - 1) == 0) return kHostMemory;
  if (std::strncmp(link, kLinkPrefix, sizeof(kLinkPrefix) - 1) != 0) return kNoMemory;
  const int machine = std::atoi(link + sizeof(kLinkPrefix) - 1);
  for (const auto& device : driver()->devices) {
    if (device->machine == machine) return device->ordinal;
  }
  return 0;
}

}  // namespace

void epd::fake_cuda::count_allocations(Holdings& holdings) {
  holdings.allocations = allocations().size();
}

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags) {
  if (const CUresult error = enter("cuMemGetAllocationGranularity", Needs::kNothing)) return error;
  if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return check(prop);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size,
                             const CUmemAllocationProp* prop, unsigned long long flags) {
  if (const CUresult error = enter("cuMemCreate", Needs::kNothing)) return error;
  if (const CUresult error = check(prop)) return error;
  if (handle == nullptr || flags != 0 || size == 0 || size % kGranularity != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (size > kDeviceBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool on_device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const std::string name =
      on_device ? "epd_fake_cuda_device_" + std::to_string(driver()->device(prop->location.id)->machine)
                : "epd_fake_cuda_host";
  const auto made = std::make_shared<Allocation>();
  made->fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  made->device = on_device ? prop->location.id : kHostMemory;
  made->bytes = size;
  made->shareable = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (made->fd < 0 || ::ftruncate(made->fd, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(allocations().add(made));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (const CUresult error = enter("cuMemRelease", Needs::kNothing)) return error;
  const std::shared_ptr<Allocation> known = find(handle);
  if (known == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (known->held.fetch_sub(1) == 1) allocations().remove(pointer(handle));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  if (const CUresult error = enter("cuMemRetainAllocationHandle", Needs::kNothing)) return error;
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  const auto mapped = memory().mapped_at(reinterpret_cast<std::uintptr_t>(address), begin, bytes);
  if (handle == nullptr || mapped == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mapped->held.fetch_add(1);
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(allocations().add(mapped));
  return CUDA_SUCCESS;
}

// Knows only memory of cuMemMap. Nobody here asks for other memory.
CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* base, std::size_t* size, CUdeviceptr address) {
  if (const CUresult error = enter("cuMemGetAddressRange", Needs::kContext)) return error;
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  if (memory().mapped_at(address, begin, bytes) == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = begin;
  if (size != nullptr) *size = bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
  if (const CUresult error = enter("cuMemExportToShareableHandle", Needs::kNothing)) return error;
  const std::shared_ptr<Allocation> known = find(handle);
  if (known == nullptr || shareable == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!known->shareable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int fd = ::fcntl(known->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(shareable) = fd;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                                CUmemAllocationHandleType type) {
  if (const CUresult error = enter("cuMemImportFromShareableHandle", Needs::kNothing)) return error;
  if (handle == nullptr || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int given = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
  const int device = device_of(given);
  struct stat file {};
  if (device == kNoMemory || ::fstat(given, &file) != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<Allocation>();
  made->fd = ::fcntl(given, F_DUPFD_CLOEXEC, 0);
  made->device = device;
  made->bytes = static_cast<std::size_t>(file.st_size);
  made->shareable = true;
  if (made->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(allocations().add(made));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                        CUmemGenericAllocationHandle handle) {
  if (const CUresult error = enter("cuMemGetAllocationPropertiesFromHandle", Needs::kNothing)) return error;
  const std::shared_ptr<Allocation> known = find(handle);
  if (known == nullptr || prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *prop = {};
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->requestedHandleTypes =
      known->shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  const bool on_device = known->device != kHostMemory;
  prop->location.type = on_device ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop->location.id = on_device ? known->device : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t size, std::size_t alignment,
                                     CUdeviceptr, unsigned long long flags) {
  if (const CUresult error = enter("cuMemAddressReserve", Needs::kNothing)) return error;
  if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().reserve(size, alignment, *address);
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  if (const CUresult error = enter("cuMemAddressFree", Needs::kNothing)) return error;
  return memory().free_reserved(address, size);
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  if (const CUresult error = enter("cuMemMap", Needs::kNothing)) return error;
  const std::shared_ptr<Allocation> known = find(handle);
  if (known == nullptr || offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().map(address, size, known);
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t size) {
  if (const CUresult error = enter("cuMemUnmap", Needs::kNothing)) return error;
  return memory().unmap(address, size);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* desc,
                                std::size_t count) {
  if (const CUresult error = enter("cuMemSetAccess", Needs::kNothing)) return error;
  return memory().allow(address, size, desc, count);
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  if (const CUresult error = enter("cuMemAlloc", Needs::kContext)) return error;
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > kDeviceBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  void* block = nullptr;
  const int home = current_context()->device.ordinal;
  if (const CUresult error = memory().allocate(bytes, RangeKind::kDevice, home, block)) return error;
  *address = reinterpret_cast<CUdeviceptr>(block);
  return CUDA_SUCCESS;
}

// As the true one, this waits for everything that the device still has to do.
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  if (const CUresult error = enter("cuMemFree", Needs::kContext)) return error;
  if (address == 0) return CUDA_SUCCESS;
  if (const CUresult error = synchronise_context(*current_context())) return error;
  return memory().free(pointer(address), RangeKind::kDevice);
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  if (const CUresult error = enter("cuCtxEnablePeerAccess", Needs::kContext)) return error;
  const std::shared_ptr<Context> known = driver()->contexts.find(peer);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().reach(current_context()->device.ordinal, known->device.ordinal);
}

CUresult CUDAAPI cuMemHostAlloc(void** address, std::size_t bytes, unsigned int) {
  if (const CUresult error = enter("cuMemHostAlloc", Needs::kContext)) return error;
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return memory().allocate(bytes, RangeKind::kHost, -1, *address);
}

CUresult CUDAAPI cuMemFreeHost(void* address) {
  if (const CUresult error = enter("cuMemFreeHost", Needs::kContext)) return error;
  if (const CUresult error = synchronise_context(*current_context())) return error;
  return memory().free(address, RangeKind::kHost);
}

CUresult CUDAAPI cuMemHostRegister(void* address, std::size_t bytes, unsigned int) {
  if (const CUresult error = enter("cuMemHostRegister", Needs::kContext)) return error;
  return memory().add_registered(address, bytes);
}

CUresult CUDAAPI cuMemHostUnregister(void* address) {
  if (const CUresult error = enter("cuMemHostUnregister", Needs::kContext)) return error;
  return memory().remove_registered(address);
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned int flags) {
  if (const CUresult error = enter("cuMemHostGetDevicePointer", Needs::kContext)) return error;
  if (address == nullptr || flags != 0 || !memory().known(host, 1)) return CUDA_ERROR_INVALID_VALUE;
  *address = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  if (const CUresult error = enter("cuMemGetInfo", Needs::kContext)) return error;
  if (free_bytes != nullptr) *free_bytes = kDeviceBytes;
  if (total_bytes != nullptr) *total_bytes = kDeviceBytes;
  return CUDA_SUCCESS;
}
