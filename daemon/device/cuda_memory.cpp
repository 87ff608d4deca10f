#include "cuda_memory.h"

#include "cuda_device.h"

#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

namespace epd::device {
namespace {

CUmemAllocationProp properties(CUdevice device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

// Properties of host memory at the GPU's NUMA node.
Result<CUmemAllocationProp> host_properties(const CudaDriver& driver, CUdevice device) {
  CUmemAllocationProp prop = properties(device);
  int node = 0;
  const CUresult result = driver.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuDeviceGetAttribute", result));
  prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop.location.id = node < 0 ? 0 : node;
  return prop;
}

Result<std::uint64_t> rounded(const CudaDriver& driver, const CUmemAllocationProp& prop,
                              std::uint64_t bytes) {
  std::size_t unit = 0;
  const CUresult result =
      driver.cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return internal_error(driver.describe("cuMemGetAllocationGranularity", result));
  return (bytes + unit - 1) / unit * unit;
}

// Keeps the first failure of several calls.
struct Failure {
  const char* call = nullptr;
  CUresult result = CUDA_SUCCESS;

  bool failed() const { return result != CUDA_SUCCESS; }
  void note(const char* what, CUresult its) {
    if (!failed()) *this = {what, its};
  }
};

Result<CUdevice> find_device(const CudaDriver& driver, const DeviceName& name) {
  int count = 0;
  Failure failure{"cuDeviceGetCount", driver.cuDeviceGetCount(&count)};
  CUdevice device = 0;
  if (!failure.failed() && name.index >= static_cast<std::uint32_t>(count)) {
    return Status(StatusCode::kUnsupported,
                  "device is " + name.text() + ", and the driver has " + std::to_string(count) +
                      " GPUs; allowed: cuda:0 .. cuda:" + std::to_string(count - 1));
  }
  if (!failure.failed()) failure = {"cuDeviceGet", driver.cuDeviceGet(&device, static_cast<int>(name.index))};
  if (!failure.failed()) return device;
  return Status(StatusCode::kUnsupported, name.text() + ": " + driver.describe(failure.call, failure.result));
}

// Requirements without which a device can't be served.
struct Need {
  CUdevice_attribute attribute;
  const char* what;
};
constexpr Need kNeeds[] = {
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory by file descriptor"},
    {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
     "memory of the host by file descriptor (HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)"},
};

// Addresses, and the pieces of one size that are mapped there, one after the other.
class CudaArena final : public Arena {
 public:
  CudaArena(const CudaDriver& driver, CUdeviceptr base, std::uint64_t piece_bytes, std::size_t pieces)
      : Arena(reinterpret_cast<std::byte*>(base)),
        driver_(driver),
        piece_bytes_(piece_bytes),
        pieces_(pieces) {}
  ~CudaArena() override {
    const auto base = reinterpret_cast<CUdeviceptr>(bytes());
    for (std::size_t i = 0; i < mapped_; ++i)
      cuda_must(driver_, "cuMemUnmap", driver_.cuMemUnmap(base + i * piece_bytes_, piece_bytes_));
    cuda_must(driver_, "cuMemAddressFree", driver_.cuMemAddressFree(base, pieces_ * piece_bytes_));
  }
  CUresult map_next(CUmemGenericAllocationHandle handle) {
    const auto base = reinterpret_cast<CUdeviceptr>(bytes());
    const CUresult result = driver_.cuMemMap(base + mapped_ * piece_bytes_, piece_bytes_, 0, handle, 0);
    if (result == CUDA_SUCCESS) ++mapped_;
    return result;
  }

 private:
  const CudaDriver& driver_;
  const std::uint64_t piece_bytes_;
  const std::size_t pieces_;
  std::size_t mapped_ = 0;
};

}  // namespace

Result<DeviceFacts> cuda_facts(const DeviceName& name) {
  Result<const CudaDriver*> loaded = cuda_driver();
  if (!loaded.ok()) return loaded.status();
  const CudaDriver& driver = **loaded;
  Result<CUdevice> found = find_device(driver, name);
  if (!found.ok()) return found.status();
  const CUdevice device = *found;
  Failure failure;
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    failure.note("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(&value, which, device));
    return value;
  };
  for (const Need& need : kNeeds) {
    if (attribute(need.attribute) == 0 && !failure.failed())
      return Status(StatusCode::kUnsupported, name.text() + " has no " + need.what + ", which epd needs");
  }
  DeviceFacts facts;
  CUuuid uuid{};
  char model[128] = {};
  int version = 0;
  failure.note("cuDeviceGetUuid", driver.cuDeviceGetUuid(&uuid, device));
  failure.note("cuDeviceGetName", driver.cuDeviceGetName(model, sizeof(model), device));
  failure.note("cuDriverGetVersion", driver.cuDriverGetVersion(&version));
  for (std::size_t i = 0; i < facts.uuid.size(); ++i)
    facts.uuid[i] = static_cast<std::uint8_t>(uuid.bytes[i]);
  facts.model = model;
  facts.driver = static_cast<std::uint32_t>(version);
  facts.num_sms = static_cast<std::uint32_t>(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  facts.compute = static_cast<std::uint32_t>(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 10 +
                                             attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  facts.mps = attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0;
  if (failure.failed()) {
    return Status(StatusCode::kUnsupported,
                  name.text() + ": " + driver.describe(failure.call, failure.result));
  }
  return facts;
}

Result<bool> cuda_devices_reach_each_other(const DeviceName& a, const DeviceName& b) {
  Result<const CudaDriver*> loaded = cuda_driver();
  if (!loaded.ok()) return loaded.status();
  const CudaDriver& driver = **loaded;
  Result<CUdevice> first = find_device(driver, a);
  if (!first.ok()) return first.status();
  Result<CUdevice> second = find_device(driver, b);
  if (!second.ok()) return second.status();
  int there = 0;
  int back = 0;
  CUresult result = driver.cuDeviceCanAccessPeer(&there, *first, *second);
  if (result == CUDA_SUCCESS) result = driver.cuDeviceCanAccessPeer(&back, *second, *first);
  if (result != CUDA_SUCCESS) {
    return Status(StatusCode::kUnsupported,
                  a.text() + " and " + b.text() + ": " + driver.describe("cuDeviceCanAccessPeer", result));
  }
  return there != 0 && back != 0;
}

namespace {

// Only the descriptor keeps the memory. A handle would keep it in this process as well.
Result<UniqueFd> make_memory(const CudaDriver& driver, const DeviceName& name,
                             const CUmemAllocationProp& prop, std::uint64_t bytes) {
  Result<std::uint64_t> size = rounded(driver, prop, bytes);
  if (!size.ok()) return size.status();
  CUmemGenericAllocationHandle handle = 0;
  CUresult result = driver.cuMemCreate(&handle, *size, &prop, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    const bool on_gpu = prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    return resource_exhausted((on_gpu ? name.text() : "the host of " + name.text()) + " has no " +
                              std::to_string(*size) +
                              " bytes left for an arena; allowed: what its memory holds");
  }
  if (result != CUDA_SUCCESS)
    return internal_error(name.text() + ": " + driver.describe("cuMemCreate", result));
  int fd = -1;
  Failure failure;
  failure.note("cuMemExportToShareableHandle",
               driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  failure.note("cuMemRelease", driver.cuMemRelease(handle));
  UniqueFd exported(fd);
  if (failure.failed())
    return internal_error(name.text() + ": " + driver.describe(failure.call, failure.result));
  return exported;
}

Result<UniqueFd> make_memory(const DeviceName& name, bool of_host, std::uint64_t bytes) {
  Result<const CudaDriver*> loaded = cuda_driver();
  if (!loaded.ok()) return loaded.status();
  const CudaDriver& driver = **loaded;
  Result<CUdevice> device = find_device(driver, name);
  if (!device.ok()) return device.status();
  if (!of_host) return make_memory(driver, name, properties(*device), bytes);
  Result<CUmemAllocationProp> prop = host_properties(driver, *device);
  return prop.ok() ? make_memory(driver, name, *prop, bytes) : prop.status();
}

}  // namespace

Result<UniqueFd> make_cuda_memory(const DeviceName& name, std::uint64_t bytes) {
  return make_memory(name, false, bytes);
}

Result<UniqueFd> make_cuda_host_memory(const DeviceName& name, std::uint64_t bytes) {
  return make_memory(name, true, bytes);
}

namespace {

// Owns an imported handle. A mapping keeps the memory without it.
class Import {
 public:
  explicit Import(const CudaDriver& driver) : driver_(driver) {}
  Import(Import&& other) noexcept
      : driver_(other.driver_), handle_(other.handle_), valid_(std::exchange(other.valid_, false)) {}
  Import& operator=(Import&&) = delete;
  ~Import() {
    if (valid_) cuda_must(driver_, "cuMemRelease", driver_.cuMemRelease(handle_));
  }
  CUresult open(int fd) {
    const CUresult result = driver_.cuMemImportFromShareableHandle(
        &handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    valid_ = result == CUDA_SUCCESS;
    return result;
  }
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const CudaDriver& driver_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool valid_ = false;
};

constexpr CUmemLocation of_device(CUdevice device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// Maps the memory for the named locations. A GPU among them may be a peer of the memory's own GPU. `size` is
// a piece's, a multiple of the granularity.
std::unique_ptr<Arena> map_handles(const CudaDriver& driver, std::initializer_list<CUmemLocation> who,
                                   std::span<const Import> pieces, std::uint64_t size, Failure& failure) {
  CUdeviceptr base = 0;
  const std::uint64_t bytes = size * pieces.size();
  failure = {"cuMemAddressReserve", driver.cuMemAddressReserve(&base, bytes, 0, 0, 0)};
  if (failure.failed()) return nullptr;
  auto arena = std::make_unique<CudaArena>(driver, base, size, pieces.size());
  for (const Import& piece : pieces) {
    failure = {"cuMemMap", arena->map_next(piece.get())};
    if (failure.failed()) return nullptr;
  }
  for (const CUmemLocation& location : who) {
    CUmemAccessDesc access{};
    access.location = location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!failure.failed()) failure = {"cuMemSetAccess", driver.cuMemSetAccess(base, bytes, &access, 1)};
  }
  return !failure.failed() ? std::move(arena) : nullptr;
}

}  // namespace

namespace {

Result<std::unique_ptr<Arena>> map_memory(const CudaDriver& driver, const CUmemAllocationProp& prop,
                                          std::initializer_list<CUmemLocation> who, int fd,
                                          std::uint64_t bytes) {
  Result<std::uint64_t> size = rounded(driver, prop, bytes);
  if (!size.ok()) return size.status();
  Import import(driver);
  Failure failure{"cuMemImportFromShareableHandle", import.open(fd)};
  std::unique_ptr<Arena> arena;
  if (!failure.failed()) arena = map_handles(driver, who, {&import, 1}, *size, failure);
  if (arena != nullptr) return arena;
  return internal_error("an arena of " + std::to_string(bytes) +
                        " bytes can't be mapped: " + driver.describe(failure.call, failure.result));
}

}  // namespace

Result<std::unique_ptr<Arena>> map_cuda_memory(const CudaDriver& driver, CUdevice device, int fd,
                                               std::uint64_t bytes) {
  return map_memory(driver, properties(device), {of_device(device)}, fd, bytes);
}

Result<std::unique_ptr<Arena>> map_cuda_host_memory(const CudaDriver& driver, CUdevice device, int fd,
                                                    std::uint64_t bytes) {
  CUmemLocation host{};
  host.type = CU_MEM_LOCATION_TYPE_HOST;
  Result<CUmemAllocationProp> prop = host_properties(driver, device);
  if (!prop.ok()) return prop.status();
  return map_memory(driver, *prop, {of_device(device), host}, fd, bytes);
}

namespace {

constexpr const char* kAllowedPieces =
    "; allowed: what cuMemExportToShareableHandle gives for an allocation of cuMemCreate on this rank's GPU";

// Imports a client's piece. INVALID_ARGUMENT: it is no memory of a GPU, or (`here`) of another GPU.
Status import_piece(const CudaDriver& driver, CUdevice device, int fd, bool here, Import& import) {
  Failure failure{"cuMemImportFromShareableHandle", import.open(fd)};
  CUmemAllocationProp prop{};
  if (!failure.failed()) {
    failure = {"cuMemGetAllocationPropertiesFromHandle",
               driver.cuMemGetAllocationPropertiesFromHandle(&prop, import.get())};
  }
  if (failure.failed())
    return invalid_argument("is none of a GPU: " + driver.describe(failure.call, failure.result) +
                            kAllowedPieces);
  const bool on_gpu = prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (on_gpu && (!here || prop.location.id == device)) return {};
  return invalid_argument("is on " +
                          (on_gpu ? "GPU " + std::to_string(prop.location.id)
                                  : "location type " + std::to_string(prop.location.type)) +
                          ", and the rank on GPU " + std::to_string(device) + kAllowedPieces);
}

}  // namespace

Result<std::unique_ptr<Arena>> map_cuda_client_memory(const CudaDriver& driver, CUdevice device,
                                                      std::span<const UniqueFd> pieces, std::uint64_t bytes,
                                                      bool here) {
  Result<std::uint64_t> size = rounded(driver, properties(device), bytes);
  if (!size.ok()) return size.status();
  std::vector<Import> imports;
  for (const UniqueFd& piece : pieces) {
    imports.emplace_back(driver);
    const Status imported = import_piece(driver, device, piece.get(), here, imports.back());
    if (!imported.ok()) return imported;
  }
  Failure failure;
  std::unique_ptr<Arena> memory = map_handles(driver, {of_device(device)}, imports, *size, failure);
  if (memory != nullptr) return memory;
  return invalid_argument("can't be mapped as far as " + std::to_string(*size) +
                          " bytes: " + driver.describe(failure.call, failure.result) +
                          "; allowed: an allocation of that size");
}

namespace {

class IpcArena final : public Arena {
 public:
  IpcArena(RetiredMemory& retired, CUdeviceptr base)
      : Arena(reinterpret_cast<std::byte*>(base)), retired_(retired) {}
  ~IpcArena() override { retired_.add_opened(reinterpret_cast<CUdeviceptr>(bytes())); }

 private:
  RetiredMemory& retired_;
};

Status waits_for(const char* what) {
  return {StatusCode::kResourceExhausted, std::string("can't be mapped now: it waits for ") + what +
                                              ", which is when the device has had no call for some ms"};
}

}  // namespace

// A handle that somebody has made up may open other memory of the process that it names. So what has been
// opened is compared with what the client said of its allocation.
Result<std::unique_ptr<Arena>> map_cuda_ipc_memory(const CudaDriver& driver, CUdevice device,
                                                   const abi::MemoryRange& range, bool here,
                                                   RetiredMemory& retired) {
  constexpr const char* kAllowed = "; allowed: what cuIpcGetMemHandle gives for memory of cudaMalloc";
  CUipcMemHandle handle{};
  static_assert(sizeof(handle) == sizeof(range.handle));
  std::memcpy(&handle, range.handle.data(), sizeof(handle));
  if (retired.is_full()) return waits_for("too much other memory to be unmapped first");
  CUdeviceptr base = 0;
  CUresult result = driver.cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS)
    return invalid_argument("can't be opened: " + driver.describe("cuIpcOpenMemHandle", result) + kAllowed);
  const bool is_new = retired.note_opened(base, range.id, range.whole);
  auto memory = std::make_unique<IpcArena>(retired, base);
  if (!is_new) return waits_for("what was freed at its address to be unmapped first");
  int ordinal = -1;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* answers[] = {&ordinal, &begin, &bytes};
  result = driver.cuPointerGetAttributes(std::size(asked), asked, answers, base);
  if (result != CUDA_SUCCESS)
    return invalid_argument("is unknown: " + driver.describe("cuPointerGetAttributes", result));
  if (begin != base || bytes != range.whole || (here && ordinal != device)) {
    return invalid_argument("has " + std::to_string(bytes) + " bytes on GPU " + std::to_string(ordinal) +
                            ", and was said to have " + std::to_string(range.whole) +
                            (here ? " on GPU " + std::to_string(device) : "") + kAllowed);
  }
  return std::unique_ptr<Arena>(std::move(memory));
}

}  // namespace epd::device
