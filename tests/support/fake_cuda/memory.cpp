#include "fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace epd::fake_cuda {
namespace {

constexpr std::uint64_t kHostBit = std::uint64_t{1} << 63;  // of Range::devices

constexpr std::uint64_t kAllDevices = ~std::uint64_t{0};

std::uint64_t device_bit(int device) {
  return std::uint64_t{1} << device;
}

void* at(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

bool keep_addresses(std::uintptr_t address, std::size_t bytes) {
  return ::mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) != MAP_FAILED;
}

int protection(CUmemAccess_flags flags) {
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ) return PROT_READ;
  return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_NONE;
}

}  // namespace

Allocation::~Allocation() {
  if (fd >= 0) ::close(fd);
}

Memory& memory() {
  static Memory* const the_memory = new Memory;
  return *the_memory;
}

bool Memory::reaches(int device, std::uintptr_t address, std::size_t bytes) const {
  const std::uintptr_t end = address + bytes;
  while (address < end) {
    auto range = ranges_.upper_bound(address);
    if (range == ranges_.begin()) return false;
    --range;
    if (address - range->first >= range->second.bytes) return false;
    if (device >= 0 && (range->second.devices >> device & 1) == 0) return false;
    if (device < 0 && range->second.devices == 0) return false;
    address = range->first + range->second.bytes;
  }
  return true;
}

bool Memory::accessible(int device, const void* address, std::size_t bytes) const {
  const std::shared_lock lock(mutex_);
  (void)used_.load(std::memory_order_acquire);
  return reaches(device, reinterpret_cast<std::uintptr_t>(address), bytes);
}

bool Memory::reserved(std::uintptr_t address, std::size_t bytes) const {
  auto range = reserved_.upper_bound(address);
  if (range == reserved_.begin()) return false;
  --range;
  return address + bytes <= range->first + range->second.bytes;
}

std::vector<Memory::Map::iterator> Memory::mappings(std::uintptr_t address, std::size_t bytes) {
  std::vector<Map::iterator> found;
  for (const std::uintptr_t end = address + bytes; address < end;) {
    const auto range = ranges_.find(address);
    if (range == ranges_.end() || range->second.kind != RangeKind::kMapped) return {};
    if (range->second.bytes > end - address) return {};
    found.push_back(range);
    address += range->second.bytes;
  }
  return found;
}

void Memory::count(Holdings& holdings) const {
  const std::shared_lock lock(mutex_);
  holdings.reservations = reserved_.size();
  for (const auto& [address, range] : ranges_) {
    if (range.kind == RangeKind::kMapped) holdings.mapped_bytes += range.bytes;
  }
}

CUresult Memory::reserve(std::size_t bytes, std::size_t alignment, CUdeviceptr& address) {
  alignment = alignment < kGranularity ? kGranularity : alignment;
  if (bytes == 0 || bytes % kGranularity != 0 || (alignment & (alignment - 1)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  void* const block =
      ::mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = reinterpret_cast<std::uintptr_t>(block);
  const std::uintptr_t aligned = (first + alignment - 1) / alignment * alignment;
  if (aligned != first) ::munmap(block, aligned - first);
  if (const std::size_t rest = first + alignment - aligned; rest != 0) ::munmap(at(aligned + bytes), rest);
  const std::unique_lock lock(mutex_);
  reserved_[aligned] = {bytes, RangeKind::kReserved, 0};
  address = aligned;
  return CUDA_SUCCESS;
}

CUresult Memory::free_reserved(CUdeviceptr address, std::size_t bytes) {
  const std::unique_lock lock(mutex_);
  const auto range = reserved_.find(address);
  if (range == reserved_.end() || range->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto next = ranges_.lower_bound(address);
  if (next != ranges_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(pointer(address), bytes);
  reserved_.erase(range);
  return CUDA_SUCCESS;
}

CUresult Memory::map(CUdeviceptr address, std::size_t bytes, std::shared_ptr<Allocation> allocation) {
  const std::unique_lock lock(mutex_);
  if (bytes == 0 || bytes % kGranularity != 0 || address % kGranularity != 0 || bytes > allocation->bytes)
    return CUDA_ERROR_INVALID_VALUE;
  if (bytes != allocation->bytes)
    return CUDA_ERROR_NOT_SUPPORTED;  // an allocation is mapped as a whole (CUDA 13.0)
  if (!reserved(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto next = ranges_.lower_bound(address);
  if (next != ranges_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const int home = allocation->device;
  ranges_[address] = {bytes, RangeKind::kMapped, 0, home, std::move(allocation), ++last_id_};
  return CUDA_SUCCESS;
}

std::shared_ptr<Allocation> Memory::mapped_at(std::uintptr_t address, std::uintptr_t& begin,
                                              std::size_t& bytes) const {
  const std::shared_lock lock(mutex_);
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return nullptr;
  --range;
  if (address - range->first >= range->second.bytes) return nullptr;
  begin = range->first;
  bytes = range->second.bytes;
  return range->second.allocation;
}

CUresult Memory::unmap(CUdeviceptr address, std::size_t bytes) {
  const std::unique_lock lock(mutex_);
  const auto parts = mappings(address, bytes);
  if (parts.empty() || !keep_addresses(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& part : parts) ranges_.erase(part);
  return CUDA_SUCCESS;
}

CUresult Memory::allow(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* desc,
                       std::size_t count) {
  const std::unique_lock lock(mutex_);
  const auto parts = mappings(address, bytes);
  if (parts.empty() || desc == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t given = 0;
  std::uint64_t taken = 0;
  int most = PROT_NONE;
  for (std::size_t i = 0; i < count; ++i) {
    const bool of_device = desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (!of_device && desc[i].location.type != CU_MEM_LOCATION_TYPE_HOST) return CUDA_ERROR_INVALID_VALUE;
    if (of_device && driver()->device(desc[i].location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    for (const auto& part : parts) {
      const int home = part->second.home;
      // The host reaches its own memory alone, and that all devices do.
      if (of_device ? home >= 0 && !can_reach(desc[i].location.id, home) : home >= 0)
        return of_device ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_NOT_SUPPORTED;
    }
    const std::uint64_t bit = of_device ? std::uint64_t{1} << desc[i].location.id : kHostBit;
    const int wanted = protection(desc[i].flags);
    (wanted == PROT_NONE ? taken : given) |= bit;
    most |= wanted;
  }
  for (const auto& part : parts) {
    Range& range = part->second;
    // Accesses that another device already has stay allowed: the process has one mapping for all.
    if ((range.devices & ~taken & ~given) != 0) most = PROT_READ | PROT_WRITE;
    if (::mprotect(at(part->first), range.bytes, most) != 0) return CUDA_ERROR_INVALID_VALUE;
    range.devices = (range.devices | given) & ~taken;
  }
  return CUDA_SUCCESS;
}

CUresult Memory::allocate(std::size_t bytes, RangeKind kind, int home, void*& address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t unit = kind == RangeKind::kDevice ? kGranularity : 4096;
  if (bytes > std::size_t{1} << 46) return CUDA_ERROR_OUT_OF_MEMORY;
  bytes = (bytes + unit - 1) / unit * unit;
  const int fd = kind == RangeKind::kDevice ? ::memfd_create("epd_fake_cuda_malloc", MFD_CLOEXEC) : -1;
  if (kind == RangeKind::kDevice && (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0))
    return CUDA_ERROR_OUT_OF_MEMORY;
  const std::unique_lock lock(mutex_);
  void* block = MAP_FAILED;
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (const auto before = freed_.find(bytes); fd >= 0 && before != freed_.end()) {
    block = ::mmap(at(before->second), bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED_NOREPLACE, fd, 0);
    freed_.erase(before);
  }
  if (block == MAP_FAILED) block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (block == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::uint64_t devices = home < 0 ? kAllDevices : device_bit(home) | reached_by_[home];
  ranges_[reinterpret_cast<std::uintptr_t>(block)] = {bytes, kind, devices, home, nullptr, ++last_id_, fd};
  address = block;
  return CUDA_SUCCESS;
}

CUresult Memory::open(int fd, std::size_t bytes, int home, int device, CUdeviceptr& address) {
  if (device != home && !can_reach(device, home)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  void* const block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (block == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::unique_lock lock(mutex_);
  address = reinterpret_cast<CUdeviceptr>(block);
  ranges_[address] = {bytes, RangeKind::kOpened, device_bit(device), home, nullptr, ++last_id_, fd};
  return CUDA_SUCCESS;
}

Known Memory::look_up(CUdeviceptr address) const {
  const std::shared_lock lock(mutex_);
  auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return {};
  --range;
  if (address - range->first >= range->second.bytes || range->second.id == 0) return {};
  const Range& r = range->second;
  const bool by_descriptor = r.allocation != nullptr && r.allocation->shareable;
  return {r.id, range->first, r.bytes, r.home, r.fd, by_descriptor};
}

CUresult Memory::reach(int device, int peer) {
  if (device == peer) return CUDA_ERROR_INVALID_DEVICE;
  if (!can_reach(device, peer)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const std::unique_lock lock(mutex_);
  std::uint64_t& reached_by = reached_by_[peer];
  if ((reached_by & device_bit(device)) != 0) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  reached_by |= device_bit(device);
  for (auto& [address, range] : ranges_) {
    if (range.kind == RangeKind::kDevice && range.home == peer) range.devices |= device_bit(device);
  }
  return CUDA_SUCCESS;
}

CUresult Memory::free(void* address, RangeKind kind) {
  const std::unique_lock lock(mutex_);
  const auto range = ranges_.find(reinterpret_cast<std::uintptr_t>(address));
  if (range == ranges_.end() || range->second.kind != kind) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(address, range->second.bytes);
  if (range->second.fd >= 0) ::close(range->second.fd);
  if (kind == RangeKind::kDevice) freed_.emplace(range->second.bytes, range->first);
  ranges_.erase(range);
  return CUDA_SUCCESS;
}

CUresult Memory::add_registered(void* address, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t page = first / 4096 * 4096;
  std::vector<unsigned char> resident((first + bytes - page + 4095) / 4096);
  if (bytes == 0 || ::mincore(at(page), first + bytes - page, resident.data()) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const std::unique_lock lock(mutex_);
  const auto next = ranges_.lower_bound(first);
  if (next != ranges_.end() && next->first < first + bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > first) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  ranges_[first] = {bytes, RangeKind::kRegistered, kAllDevices, -1};
  return CUDA_SUCCESS;
}

CUresult Memory::remove_registered(void* address) {
  const std::unique_lock lock(mutex_);
  const auto range = ranges_.find(reinterpret_cast<std::uintptr_t>(address));
  if (range == ranges_.end() || range->second.kind != RangeKind::kRegistered)
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  ranges_.erase(range);
  return CUDA_SUCCESS;
}

}  // namespace epd::fake_cuda
