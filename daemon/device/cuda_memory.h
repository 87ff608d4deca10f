// Device memory by descriptors: made by the supervisor, mapped by engines.
#pragma once

#include "cuda_driver.h"
#include "device/device.h"
#include "device/memory.h"

namespace epd::device {

Result<DeviceFacts> cuda_facts(const DeviceName& device);
Result<bool> cuda_devices_reach_each_other(const DeviceName& a, const DeviceName& b);
Result<UniqueFd> make_cuda_memory(const DeviceName& device, std::uint64_t bytes);
// Of the host, near the GPU, which is to write it.
Result<UniqueFd> make_cuda_host_memory(const DeviceName& device, std::uint64_t bytes);
// Of this or a peer's memory, for `device`; needs no context.
Result<std::unique_ptr<Arena>> map_cuda_memory(const CudaDriver& driver, CUdevice device, int fd,
                                               std::uint64_t bytes);

// Of make_cuda_host_memory: for the device and for the calling process.
Result<std::unique_ptr<Arena>> map_cuda_host_memory(const CudaDriver& driver, CUdevice device, int fd,
                                                    std::uint64_t bytes);

// A client's own; INVALID_ARGUMENT, see Device::map_client_memory.
Result<std::unique_ptr<Arena>> map_cuda_client_memory(const CudaDriver& driver, CUdevice device, int fd,
                                                      std::uint64_t bytes, bool here);

}  // namespace epd::device
