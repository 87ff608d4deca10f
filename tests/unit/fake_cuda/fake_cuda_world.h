// Ranks of a group on the devices of the fake driver, all in one process, and their memory.
#pragma once

#include "gpu/kernel_cases.h"
#include "gpu/rank_regions.h"
#include "kernels/cuda.h"
#include "kernels/workers.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace epd::fake_cuda_test {

using kernels::Kind;
using kernels::OpError;
using kernels::OpResult;
using kernels::cuda::Operation;

inline constexpr std::size_t kUnit = std::size_t{2} << 20;

inline std::string name_of(CUresult result) {
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  return name == nullptr ? std::to_string(result) : name;
}
inline void must(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": " + name_of(result));
}
#define EPD_CU(call) ::epd::fake_cuda_test::must((call), #call)

inline CUmemAllocationProp device_memory(CUdevice device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

inline CUcontext primary_context(CUdevice device) {
  EPD_CU(cuInit(0));
  CUcontext context = nullptr;
  EPD_CU(cuDevicePrimaryCtxRetain(&context, device));
  return context;
}

// Memory of a device that all devices reach, handed out in pieces.
class Arena {
 public:
  Arena(CUdevice device, std::size_t bytes) : bytes_((bytes + kUnit - 1) / kUnit * kUnit) {
    const CUmemAllocationProp prop = device_memory(device);
    CUmemGenericAllocationHandle handle = 0;
    EPD_CU(cuMemCreate(&handle, bytes_, &prop, 0));
    EPD_CU(cuMemAddressReserve(&base_, bytes_, 0, 0, 0));
    EPD_CU(cuMemMap(base_, bytes_, 0, handle, 0));
    EPD_CU(cuMemRelease(handle));
    int devices = 0;
    EPD_CU(cuDeviceGetCount(&devices));
    for (int i = 0; i < devices; ++i) {
      const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, i}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      EPD_CU(cuMemSetAccess(base_, bytes_, &access, 1));
    }
  }
  ~Arena() {
    cuMemUnmap(base_, bytes_);
    cuMemAddressFree(base_, bytes_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <typename T>
  T* take(std::size_t count) {
    T* const place = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256 + 256;
    if (used_ > bytes_) throw std::runtime_error("the test's arena is too small");
    return place;
  }

 private:
  std::size_t bytes_;
  std::size_t used_ = 0;
  CUdeviceptr base_ = 0;
};

struct Rank : gpu_test::RankRegions {
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  std::unique_ptr<Arena> arena;
};

class World {
 public:
  World(const kernels::Shape& shape, std::uint32_t max_tokens);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Rank& rank(std::uint32_t r) { return ranks_[r]; }
  std::uint32_t size() const { return shape_.num_ranks; }
  const kernels::Shape& shape() const { return shape_; }
  std::size_t choices() const { return gpu_test::num_choices(shape_); }

 private:
  void make(std::uint32_t r, std::size_t max_tokens);

  kernels::Shape shape_;
  std::vector<Rank> ranks_;
};

}  // namespace epd::fake_cuda_test
