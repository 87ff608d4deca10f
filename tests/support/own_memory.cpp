#include "support/own_memory.h"

#include "proto/arena.h"
#include "support/client.h"
#include "support/cuda_memory.h"
#include "support/ranks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

namespace epd::test {
namespace {

constexpr int kStale = 0x6b;  // what was there before
constexpr std::uint64_t kUnit = 128;

}  // namespace

std::shared_ptr<Allocation> Allocation::of_host(std::size_t bytes) {
  std::shared_ptr<Allocation> made(new Allocation);
  made->fd_ = ::memfd_create("test-own-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  RANK_CHECK(made->fd_ >= 0 && ::ftruncate(made->fd_, static_cast<off_t>(bytes)) == 0, "memfd");
  RANK_CHECK(::fcntl(made->fd_, F_ADD_SEALS, F_SEAL_SHRINK) == 0, "F_SEAL_SHRINK");
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->fd_, 0);
  RANK_CHECK(address != MAP_FAILED, "mmap");
  made->address_ = static_cast<std::byte*>(address);
  made->bytes_ = bytes;
  std::memset(address, kStale, bytes);
  return made;
}

std::shared_ptr<Allocation> Allocation::of_gpu(int gpu, std::size_t bytes) {
  std::shared_ptr<Allocation> made(new Allocation);
  const GpuAllocation on_gpu = allocate_on_gpu(gpu, bytes);
  made->gpu_ = gpu;
  made->fd_ = on_gpu.fd;
  made->address_ = on_gpu.address;
  made->bytes_ = on_gpu.bytes;
  return made;
}

std::shared_ptr<Allocation> Allocation::of_epd(int gpu, std::size_t bytes) {
  std::shared_ptr<Allocation> made(new Allocation);
  made->gpu_ = gpu;
  made->fd_ = EPD_FD_OF_ADDRESS;
  made->address_ = static_cast<std::byte*>(epd_memory_alloc(bytes, gpu, nullptr));
  RANK_CHECK(made->address_ != nullptr, epd_last_error());
  made->bytes_ = bytes;
  return made;
}

// Memory on a GPU stays until the process ends: unmapping would want all streams to be idle.
Allocation::~Allocation() {
  if (gpu_ < 0 && address_ != nullptr) ::munmap(address_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

int gpu_of(const epd_session_info_t& session) {
  return std::atoi(std::strchr(session.device, ':') + 1);
}

BoundMemory bind_regions(const epd_session_info_t& session, const epd_group_config_t& config,
                         std::uint32_t bound) {
  constexpr std::size_t kAllocations = 2;
  const std::uint64_t depth = config.depth != 0 ? config.depth : abi::kDefaultDepth;
  std::array<std::uint64_t, kAllocations> end{};
  BoundMemory made;
  std::vector<std::size_t> place;  // in which allocation, by binding
  for (std::uint32_t i = 0; i < abi::kNumRegions; ++i) {
    if ((bound >> i & 1) == 0) continue;
    epd_binding_t binding;
    epd_binding_init(&binding);
    binding.region = static_cast<epd_region_t>(i);
    std::uint64_t bytes = 0;
    must(epd_region_bytes(&config, binding.region, &bytes), "epd_region_bytes");
    place.push_back(made.bindings.size() % kAllocations);
    std::uint64_t& its_end = end[place.back()];
    binding.offset = its_end + kUnit;
    const std::uint64_t rounded = abi::align_up(bytes, kUnit);
    binding.stride = i % 3 == 0 ? 0 : rounded + kUnit * (i % 3);
    its_end = binding.offset + depth * (rounded + kUnit * (i % 3));
    made.bindings.push_back(binding);
  }
  for (const std::uint64_t bytes : end) {
    if (bytes == 0) break;
    made.memory.push_back(session.device_kind != EPD_DEVICE_KIND_CUDA ? Allocation::of_host(bytes)
                          : made.memory.empty() ? Allocation::of_gpu(gpu_of(session), bytes)
                                                : Allocation::of_epd(gpu_of(session), bytes));
  }
  for (std::size_t i = 0; i < made.bindings.size(); ++i) {
    epd_binding_t& binding = made.bindings[i];
    binding.fd = made.memory[place[i]]->fd();
    binding.address = made.memory[place[i]]->address() + binding.offset;
    if (binding.fd == EPD_FD_OF_ADDRESS) binding.offset = 0;
  }
  return made;
}

}  // namespace epd::test
