#include "cuda_memory.h"

#include <cstring>
#include <iterator>

namespace epd::client {
namespace {

constexpr const char* kExportable =
    "; allowed: memory of cuMemCreate with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR";

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

// The descriptor of the allocation of cuMemCreate in which the address lies. INVALID_ARGUMENT: there is none,
// it can't be exported, or it is not the device's.
Status export_piece(const CudaDriver& driver, CUdevice device, CUdeviceptr address, UniqueFd& out) {
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
  int fd = -1;
  error = driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (error != CUDA_SUCCESS) return cuda_status(driver, error, "cuMemExportToShareableHandle");
  out = UniqueFd(fd);
  return {};
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
    UniqueFd fd;
    Status status =
        export_piece(driver, device, allocation.begin + allocation.bytes / allocation.pieces * i, fd);
    if (!status.ok()) return status;
    fds.push_back(std::move(fd));
  }
  range.by = abi::MemoryBy::kDescriptor;
  range.pieces = allocation.pieces;
  return {};
}

}  // namespace epd::client
