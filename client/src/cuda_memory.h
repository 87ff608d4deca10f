// Allocations of a GPU: mapping them, finding and exporting them. Included only where cuda.h exists.
#pragma once

#include "cuda_driver.h"
#include "device.h"

#include <cstddef>
#include <cstdint>

namespace epd::client {

// Makes a context current in this thread, for a scope. It mostly is, and to find that out takes less time
// than to push and pop it.
class Current {
 public:
  Current(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    CUcontext before = nullptr;
    if (driver.cuCtxGetCurrent(&before) == CUDA_SUCCESS && before == context) return;
    error_ = driver.cuCtxPushCurrent(context);
    pushed_ = error_ == CUDA_SUCCESS;
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  CUresult error() const { return error_; }

 private:
  const CudaDriver& driver_;
  CUresult error_ = CUDA_SUCCESS;
  bool pushed_ = false;
};

// The kind of allocation on the device that can be exported as a descriptor.
CUmemAllocationProp exportable_memory(CUdevice device);
// `bytes` rounded up to what the driver allocates of it.
Status round_up(const CudaDriver& driver, const CUmemAllocationProp& kind, std::uint64_t bytes,
                std::size_t& out);
// Maps the allocation at addresses of its own. `whose` is its name in messages.
Status map_allocation(const CudaDriver& driver, CUmemGenericAllocationHandle allocation, std::size_t bytes,
                      const CUmemAccessDesc& access, const char* whose, CUdeviceptr& out);
void unmap_allocation(const CudaDriver& driver, CUdeviceptr address, std::size_t bytes);

// See Device::allocation_of and export_memory. A context of the device is current.
Allocation allocation_of(const CudaDriver& driver, CUdeviceptr address, std::uint64_t bytes);
Status export_memory(const CudaDriver& driver, CUdevice device, const Allocation& allocation,
                     abi::MemoryRange& range, std::vector<UniqueFd>& fds);

}  // namespace epd::client
