// Device memory by descriptors: the supervisor makes it, engines map it.
#pragma once

#include "cuda_driver.h"
#include "device/device.h"
#include "device/memory.h"
#include "proto/mapped_memory.h"
#include "retired_memory.h"

#include <span>

namespace epd::device {

Result<DeviceFacts> cuda_facts(const DeviceName& device);
Result<bool> cuda_devices_reach_each_other(const DeviceName& a, const DeviceName& b);
Result<UniqueFd> make_cuda_memory(const DeviceName& device, std::uint64_t bytes);
// Host memory near the GPU, which the GPU writes.
Result<UniqueFd> make_cuda_host_memory(const DeviceName& device, std::uint64_t bytes);
// Maps memory of `device` or of a peer, for `device`. Needs no context.
Result<std::unique_ptr<Arena>> map_cuda_memory(const CudaDriver& driver, CUdevice device, int fd,
                                               std::uint64_t bytes);

// Maps what make_cuda_host_memory() made, for the device and for the calling process.
Result<std::unique_ptr<Arena>> map_cuda_host_memory(const CudaDriver& driver, CUdevice device, int fd,
                                                    std::uint64_t bytes);

// Maps a client's own memory. INVALID_ARGUMENT: see Device::map_client_memory.
Result<std::unique_ptr<Arena>> map_cuda_client_memory(const CudaDriver& driver, CUdevice device,
                                                      std::span<const UniqueFd> pieces, std::uint64_t bytes,
                                                      bool here);

// Opens memory that a client has exported by a legacy IPC handle. Its end is `retired`'s, which must outlive
// it.
Result<std::unique_ptr<Arena>> map_cuda_ipc_memory(const CudaDriver& driver, CUdevice device,
                                                   const abi::MemoryRange& range, bool here,
                                                   RetiredMemory& retired);

}  // namespace epd::device
