#include "cuda_memory.h"

#include "exportable_memory.h"

#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace epd::client {
namespace {

constexpr const char* kExportable =
    "; allowed: memory of epd_memory_alloc, or of cuMemCreate with "
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR";

// Both ends of a handle's use, whatever happens in between.
class Held {
 public:
  Held(const CudaDriver& driver, CUmemGenericAllocationHandle handle) : driver_(driver), handle_(handle) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { driver_.cuMemRelease(handle_); }

 private:
  const CudaDriver& driver_;
  const CUmemGenericAllocationHandle handle_;
};

// A device's primary context, kept for a scope.
class Primary {
 public:
  Primary(const CudaDriver& driver, CUdevice device) : driver_(driver), device_(device) {
    error_ = driver.cuDevicePrimaryCtxRetain(&context_, device);
  }
  Primary(const Primary&) = delete;
  Primary& operator=(const Primary&) = delete;
  ~Primary() {
    if (error_ == CUDA_SUCCESS) driver_.cuDevicePrimaryCtxRelease(device_);
  }
  CUresult error() const { return error_; }
  CUcontext get() const { return context_; }

 private:
  const CudaDriver& driver_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  CUresult error_ = CUDA_SUCCESS;
};

// What allocate_exportable() has made.
struct Made {
  std::size_t bytes;
  CUdevice device;
};
struct AllMade {
  std::mutex mutex;
  std::map<CUdeviceptr, Made> made;  // guarded by mutex
};
// Never destroyed: memory may be freed while the process exits.
AllMade& all_made() {
  static auto* const all = new AllMade;
  return *all;
}

Status find_device(const CudaDriver& driver, int number, CUdevice& out) {
  int count = 0;
  CUresult error = driver.cuInit(0);
  if (error == CUDA_SUCCESS) error = driver.cuDeviceGetCount(&count);
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "starting CUDA's driver");
  if (number < 0 || number >= count)
    return bad_value("device", number, "0 .. " + std::to_string(count - 1) + ", as CUDA numbers them here");
  return cuda_status(driver, driver.cuDeviceGet(&out, number), "cuDeviceGet");
}

// Until nothing uses the memory: the work of the thread's context, and of the primary one.
Status finish_work(const CudaDriver& driver, CUdevice device) {
  CUcontext current = nullptr;
  CUresult error = driver.cuCtxGetCurrent(&current);
  if (error == CUDA_SUCCESS && current != nullptr) error = driver.cuCtxSynchronize();
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "cuCtxSynchronize");
  const Primary primary(driver, device);
  if (primary.error() != CUDA_SUCCESS)
    return cuda_status(driver, primary.error(), "cuDevicePrimaryCtxRetain");
  if (primary.get() == current) return {};
  const Current within(driver, primary.get());
  error = within.error() == CUDA_SUCCESS ? driver.cuCtxSynchronize() : within.error();
  return cuda_status(driver, error, "cuCtxSynchronize");
}

}  // namespace

CUmemAllocationProp exportable_memory(CUdevice device) {
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.location.id = device;
  return kind;
}

Status round_up(const CudaDriver& driver, const CUmemAllocationProp& kind, std::uint64_t bytes,
                std::size_t& out) {
  std::size_t granularity = 0;
  const CUresult error =
      driver.cuMemGetAllocationGranularity(&granularity, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  out = abi::align_up(bytes, granularity != 0 ? granularity : 1);
  return cuda_status(driver, error, "cuMemGetAllocationGranularity");
}

Status map_allocation(const CudaDriver& driver, CUmemGenericAllocationHandle allocation, std::size_t bytes,
                      const CUmemAccessDesc& access, const char* whose, CUdeviceptr& out) {
  const char* step = "cuMemAddressReserve";
  CUdeviceptr address = 0;
  bool mapped = false;
  CUresult error = driver.cuMemAddressReserve(&address, bytes, 0, 0, 0);
  const bool reserved = error == CUDA_SUCCESS;
  if (reserved) {
    step = "cuMemMap";
    error = driver.cuMemMap(address, bytes, 0, allocation, 0);
    mapped = error == CUDA_SUCCESS;
  }
  if (mapped) {
    step = "cuMemSetAccess";
    error = driver.cuMemSetAccess(address, bytes, &access, 1);
  }
  if (error == CUDA_SUCCESS) {
    out = address;
    return {};
  }
  if (mapped) driver.cuMemUnmap(address, bytes);
  if (reserved) driver.cuMemAddressFree(address, bytes);
  return cuda_status(driver, error,
                     std::string(step) + " of " + std::to_string(bytes) + " bytes of " + whose);
}

void unmap_allocation(const CudaDriver& driver, CUdeviceptr address, std::size_t bytes) {
  driver.cuMemUnmap(address, bytes);
  driver.cuMemAddressFree(address, bytes);
}

Status export_allocation(const CudaDriver& driver, CUdevice device, CUdeviceptr address,
                         ExportedAllocation& out) {
  CUmemGenericAllocationHandle handle = 0;
  void* const at = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  if (driver.cuMemRetainAllocationHandle(&handle, at) != CUDA_SUCCESS)
    return invalid_argument("address is " + hex(address) + ", where no memory of cuMemCreate is mapped" +
                            kExportable);
  const Held held(driver, handle);
  CUmemAllocationProp kind{};
  CUresult error = driver.cuMemGetAllocationPropertiesFromHandle(&kind, handle);
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "cuMemGetAllocationPropertiesFromHandle");
  if ((kind.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0)
    return invalid_argument("address is " + hex(address) + ", in memory that can't be exported" +
                            kExportable);
  const bool on_gpu = kind.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!on_gpu || kind.location.id != device)
    return invalid_argument("address is " + hex(address) + ", in memory of " +
                            (on_gpu ? "GPU " + std::to_string(kind.location.id) : "the host") +
                            ", and the session is on GPU " + std::to_string(device) + kExportable +
                            ", on the session's GPU");
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  error = driver.cuMemGetAddressRange(&begin, &bytes, address);
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "cuMemGetAddressRange");
  int fd = -1;
  error = driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "cuMemExportToShareableHandle");
  out = {UniqueFd(fd), begin, bytes};
  return {};
}

namespace {

// The allocation in which an address lies, and whether it can be passed on by descriptor.
struct Piece {
  Allocation allocation;
  bool by_descriptor = false;
};

Piece piece_at(const CudaDriver& driver, CUdeviceptr address) {
  Piece piece;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  std::uint64_t id = 0;
  unsigned long long handles = 0;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES};
  void* answers[] = {&id, &begin, &bytes, &handles};
  if (driver.cuPointerGetAttributes(std::size(asked), asked, answers, address) != CUDA_SUCCESS) return {};
  if (id == 0 || begin == 0 || address - begin >= bytes) return {};
  piece.allocation = {begin, bytes, 1, {id}};
  piece.by_descriptor = (handles & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  return piece;
}

Status export_ipc(const CudaDriver& driver, CUdevice device, CUdeviceptr address, abi::MemoryRange& range) {
  int ordinal = -1;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* answers[] = {&ordinal};
  CUipcMemHandle exported{};
  CUresult error = driver.cuPointerGetAttributes(1, asked, answers, address);
  if (error == CUDA_SUCCESS && ordinal != device)
    return invalid_argument("address is " + hex(address) + ", in memory of GPU " + std::to_string(ordinal) +
                            ", and the session is on GPU " + std::to_string(device) +
                            "; allowed: memory of the session's GPU");
  if (error == CUDA_SUCCESS) error = driver.cuIpcGetMemHandle(&exported, address);
  if (error != CUDA_SUCCESS)
    return invalid_argument("address is " + hex(address) +
                            ", in memory that can't be exported: " + error_name(driver, error) +
                            "; allowed: memory of cudaMalloc, or of cuMemCreate with " +
                            "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
  static_assert(sizeof(exported) == sizeof(range.handle));
  std::memcpy(range.handle.data(), &exported, sizeof(exported));
  range.by = abi::MemoryBy::kIpcHandle;
  return {};
}

}  // namespace

Allocation allocation_of(const CudaDriver& driver, CUdeviceptr address, std::uint64_t bytes) {
  const Piece first = piece_at(driver, address);
  Allocation all = first.allocation;
  while (first.by_descriptor && all.pieces < abi::kMaxPieces && all.begin + all.bytes - address < bytes) {
    const Piece next = piece_at(driver, all.begin + all.bytes);
    const bool fits = next.by_descriptor && next.allocation.begin == all.begin + all.bytes &&
                      next.allocation.bytes == first.allocation.bytes;
    if (!fits) break;
    all.ids[all.pieces++] = next.allocation.ids.front();
    all.bytes += next.allocation.bytes;
  }
  return all;
}

Status export_memory(const CudaDriver& driver, CUdevice device, const Allocation& allocation,
                     abi::MemoryRange& range, std::vector<UniqueFd>& fds) {
  CUmemGenericAllocationHandle handle = 0;
  void* const at = reinterpret_cast<void*>(allocation.begin);  // NOLINT(performance-no-int-to-ptr)
  if (driver.cuMemRetainAllocationHandle(&handle, at) != CUDA_SUCCESS)
    return export_ipc(driver, device, allocation.begin, range);
  const Held held(driver, handle);
  for (std::uint32_t i = 0; i < allocation.pieces; ++i) {
    ExportedAllocation exported;
    Status status = export_allocation(driver, device,
                                      allocation.begin + allocation.bytes / allocation.pieces * i, exported);
    if (!status.ok()) return status;
    fds.push_back(std::move(exported.fd));
  }
  range.by = abi::MemoryBy::kDescriptor;
  range.pieces = allocation.pieces;
  return {};
}

Status allocate_exportable(std::size_t bytes, int number, void*& out) {
  if (bytes == 0) return bad_value("bytes", 0, "more");
  const CudaDriver* driver = nullptr;
  Status status = load_cuda_driver(driver);
  if (!status.ok()) return status;
  CUdevice device = 0;
  status = find_device(*driver, number, device);
  if (!status.ok()) return status;
  const CUmemAllocationProp kind = exportable_memory(device);
  std::size_t size = 0;
  status = round_up(*driver, kind, bytes, size);
  if (!status.ok()) return status;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult error = driver->cuMemCreate(&handle, size, &kind, 0);
  if (error != CUDA_SUCCESS)
    return cuda_status(*driver, error, "cuMemCreate of " + std::to_string(size) + " bytes");
  const Held held(*driver, handle);  // the mapping keeps the memory
  CUmemAccessDesc access{};
  access.location = kind.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr address = 0;
  status = map_allocation(*driver, handle, size, access, "exportable memory", address);
  if (!status.ok()) return status;
  AllMade& all = all_made();
  const std::lock_guard lock(all.mutex);
  all.made[address] = {size, device};
  out = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  return {};
}

Status free_exportable(void* given) {
  if (given == nullptr) return {};
  const auto address = reinterpret_cast<CUdeviceptr>(given);
  AllMade& all = all_made();
  Made made{};
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.made.find(address);
    if (found == all.made.end())
      return invalid_argument("address is " + hex(address) +
                              "; allowed: what epd_memory_alloc returned, once");
    made = found->second;
    all.made.erase(found);
  }
  const CudaDriver* driver = nullptr;
  Status status = load_cuda_driver(driver);
  if (status.ok()) status = finish_work(*driver, made.device);
  if (status.ok()) {
    unmap_allocation(*driver, address, made.bytes);
    return {};
  }
  const std::lock_guard lock(all.mutex);
  all.made[address] = made;
  return status;
}

}  // namespace epd::client
