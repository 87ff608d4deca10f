// Memory of a test's own that the regions of a group can be bound to: memfds, or allocations of a GPU.
#pragma once

#include "epd/epd.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace epd::test {

// An allocation that can be passed on by descriptor, mapped by this process. Lives until the last copy is
// gone.
class Allocation {
 public:
  // Sealed as epd wants it, and filled with bytes that are no zeros.
  static std::shared_ptr<Allocation> of_host(std::size_t bytes);
  static std::shared_ptr<Allocation> of_gpu(int gpu, std::size_t bytes);
  // Allocates by epd_memory_alloc: fd() is EPD_FD_OF_ADDRESS.
  static std::shared_ptr<Allocation> of_epd(int gpu, std::size_t bytes);
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation();

  int fd() const { return fd_; }
  std::byte* address() const { return address_; }  // of the host, or of the device
  std::size_t bytes() const { return bytes_; }

 private:
  Allocation() = default;

  int gpu_ = -1;  // -1: the host
  int fd_ = -1;
  std::byte* address_ = nullptr;
  std::size_t bytes_ = 0;
};

// Bindings of the regions in `bound` (abi::region_bit), by turns in two allocations, with gaps. On a GPU the
// second one is named by addresses.
struct BoundMemory {
  std::vector<std::shared_ptr<Allocation>> memory;
  std::vector<epd_binding_t> bindings;
};
BoundMemory bind_regions(const epd_session_info_t& session, const epd_group_config_t& config,
                         std::uint32_t bound);
// The GPU of a session, as the driver numbers it.
int gpu_of(const epd_session_info_t& session);

}  // namespace epd::test
