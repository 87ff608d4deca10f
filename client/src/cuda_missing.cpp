// In place of cuda_device.cpp and cuda_memory.cpp where the library was configured without CUDA's header.
#include "device.h"

namespace epd::client {

Status open_cuda_device(const abi::Welcome& welcome, std::unique_ptr<Device>&) {
  return {StatusCode::kUnsupported,
          "device " + std::string(welcome.device, abi::text_length(welcome.device)) +
              " is a CUDA device, and this libepd was built without cuda.h; allowed: host devices"};
}

Status visible_gpus(std::vector<abi::GpuUuid>&) {
  return {StatusCode::kUnsupported, "this libepd was built without cuda.h"};
}

}  // namespace epd::client
