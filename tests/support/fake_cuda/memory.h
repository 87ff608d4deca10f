// The addresses that a device can reach, and their memory.
#pragma once

#include "fake_cuda/driver.h"
#include "fake_cuda/watching.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <shared_mutex>
#include <vector>

namespace epd::fake_cuda {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

inline constexpr int kHostMemory = -1;

// Memory of cuMemCreate, also of another process: a memfd that says of which device it is.
struct Allocation {
  int fd = -1;
  int device = 0;  // in this process, or kHostMemory
  std::size_t bytes = 0;
  bool shareable = false;
  std::atomic<int> held{1};  // as often as its handle was given away

  Allocation() = default;
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
};

enum class RangeKind {
  kReserved,    // addresses without memory
  kMapped,      // cuMemMap
  kDevice,      // cuMemAlloc: a memfd, which other processes may open
  kOpened,      // cuIpcOpenMemHandle
  kHost,        // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister
};

struct Range {
  std::size_t bytes = 0;
  RangeKind kind = RangeKind::kReserved;
  std::uint64_t devices = 0;  // bit d: device d of this process reaches it
  int home = -1;              // kMapped, kDevice: the device, of this process, whose memory it is
  std::shared_ptr<Allocation> allocation = nullptr;  // kMapped: what is mapped there
  std::uint64_t id = 0;                              // of all but kRegistered: never that of another range
  int fd = -1;                                       // kDevice, kOpened
};

// The driver's knowledge of an address; id 0: none.
struct Known {
  std::uint64_t id = 0;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  int home = -1;
  int fd = -1;
  bool by_descriptor = false;  // of cuMemCreate, and exportable
};

// Ranges by their first address. Mapped ranges lie within reserved ones.
class Memory {
 public:
  // Whether the device reaches all of it. Nothing is reached nowhere, and always. The caller sees all earlier
  // accesses by with(): memory that is mapped twice may show that they were earlier, and ThreadSanitizer sees
  // no order through it.
  bool accessible(int device, const void* address, std::size_t bytes) const;
  // Whether it is any memory that the driver knows, device's or pinned.
  bool known(const void* address, std::size_t bytes) const { return accessible(-1, address, bytes); }

  // Runs `use` if the device reaches the bytes, and keeps them mapped meanwhile. False: it does not.
  template <typename Use>
  bool with(int device, const void* address, std::size_t bytes, Use use) const {
    return with(device, {{address, bytes}}, use);
  }
  struct Bytes {
    const void* address;
    std::size_t bytes;
  };
  template <typename Use>
  bool with(int device, std::initializer_list<Bytes> all, Use use) const {
    const std::shared_lock lock(mutex_);
    for (const Bytes& each : all) {
      if (!reaches(device, reinterpret_cast<std::uintptr_t>(each.address), each.bytes)) return false;
    }
    use();
    used_.fetch_add(1, std::memory_order_release);
    return true;
  }

  // The same in two calls, of one thread. After false there is nothing to end.
  bool begin_use(int device, const void* address, std::size_t bytes) const {
    mutex_.lock_shared();
    const bool reached = reaches(device, reinterpret_cast<std::uintptr_t>(address), bytes);
    if (!reached) mutex_.unlock_shared();
    if (reached) used_.load(std::memory_order_acquire);
    return reached;
  }
  void end_use() const {
    used_.fetch_add(1, std::memory_order_release);
    mutex_.unlock_shared();
  }

  void count(Holdings& holdings) const;

  CUresult reserve(std::size_t bytes, std::size_t alignment, CUdeviceptr& address);
  CUresult free_reserved(CUdeviceptr address, std::size_t bytes);
  CUresult map(CUdeviceptr address, std::size_t bytes, std::shared_ptr<Allocation> allocation);
  CUresult unmap(CUdeviceptr address, std::size_t bytes);
  // The mapping at the address, and where it begins; null: nothing of cuMemMap.
  std::shared_ptr<Allocation> mapped_at(std::uintptr_t address, std::uintptr_t& begin,
                                        std::size_t& bytes) const;
  CUresult allow(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* desc, std::size_t count);

  Known look_up(CUdeviceptr address) const;
  // Memory of another process's device `home`, for `device`. Takes the descriptor if that goes well.
  CUresult open(int fd, std::size_t bytes, int home, int device, CUdeviceptr& address);

  // Allocates for device `home` and for those that reach it; -1: for all. The addresses of freed device
  // memory are given out again.
  CUresult allocate(std::size_t bytes, RangeKind kind, int home, void*& address);
  CUresult free(void* address, RangeKind kind);
  // All of `peer`'s that is of cuMemAlloc, now and later.
  CUresult reach(int device, int peer);
  CUresult add_registered(void* address, std::size_t bytes);
  CUresult remove_registered(void* address);

 private:
  using Map = std::map<std::uintptr_t, Range>;
  bool reaches(int device, std::uintptr_t address, std::size_t bytes) const;
  bool reserved(std::uintptr_t address, std::size_t bytes) const;
  // The mappings that make up exactly [address, address + bytes); empty if they don't.
  std::vector<Map::iterator> mappings(std::uintptr_t address, std::size_t bytes);

  mutable std::atomic<std::uint64_t> used_{0};
  mutable std::shared_mutex mutex_;
  Map ranges_;                                        // guarded by mutex_; all but kReserved
  Map reserved_;                                      // guarded by mutex_
  std::uint64_t last_id_ = 0;                         // guarded by mutex_
  std::multimap<std::size_t, std::uintptr_t> freed_;  // guarded by mutex_: of kDevice, by size
  std::map<int, std::uint64_t> reached_by_;  // guarded by mutex_: other devices that reach a device's memory
};

Memory& memory();
void count_allocations(Holdings& holdings);
void count_libraries(Holdings& holdings);

inline void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace epd::fake_cuda
