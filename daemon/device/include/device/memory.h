// Memory that outlives engines, and facts about a device that can be found without using it. For the
// supervisor, which never creates a context.
#pragma once

#include "common/fd.h"
#include "common/status.h"
#include "device/name.h"

#include <array>
#include <cstdint>
#include <string>

namespace epd::device {

struct DeviceFacts {
  std::array<std::uint8_t, 16> uuid{};  // zero: a host device
  std::string model;
  std::uint32_t num_sms = 0;
  std::uint32_t compute = 0;  // 90 for 9.0
  std::uint32_t driver = 0;   // 13000 for CUDA 13.0
  bool mps = false;           // contexts are shared through MPS
};

// The number of GPUs; 0 where there is no driver, or no GPU. UNSUPPORTED: the driver can't be used.
Result<std::uint32_t> num_gpus();
// UNSUPPORTED: there is no such device or no driver, or the device lacks what epd needs. The text says which.
Result<DeviceFacts> device_facts(const DeviceName& device);
// Whether engines of these two devices can map each other's memory. That fails only between GPUs without P2P.
Result<bool> devices_reach_each_other(const DeviceName& a, const DeviceName& b);

// Makes memory that any engine and client can map through the descriptor. Only the descriptor keeps it. A
// host device's memory is zeroed. That of a GPU is for its engine to clear. RESOURCE_EXHAUSTED: the device
// has no more.
Result<UniqueFd> make_arena_memory(const DeviceName& device, const char* label, std::uint64_t bytes);

// Makes memory of the host that a GPU writes: the results of calls. Zeroed.
Result<UniqueFd> make_results_memory(const DeviceName& device, std::uint64_t bytes);

// Whether a client's descriptor can be of a GPU's exported memory, as far as that can be told without using
// it: nothing that is asked here can make the caller wait for the client. It must be a device or a nameless
// file, as drivers export memory; the engines' drivers see the rest. INVALID_ARGUMENT, with a text that goes
// on after "memory".
Status check_client_memory(int fd);

}  // namespace epd::device
