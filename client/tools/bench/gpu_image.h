// The kernels that epbench launches by itself (gpu_kernels.cu).
#pragma once

#include "gpu_driver.h"

namespace epd::bench {

// Loads the image. It stays loaded until the process ends.
class GpuImage {
 public:
  // Throws kit::ToolError if there are none: epbench was built without nvcc.
  explicit GpuImage(const GpuDriver& driver);

  void* kernel(const char* name) const;
  struct Grid {
    unsigned ctas[2] = {1, 1};
    unsigned batch = 1;  // in the third direction
    unsigned threads = 1;
    unsigned shared_bytes = 0;
  };
  void launch(void* kernel, const Grid& grid, void* stream, void** arguments) const;

 private:
  const GpuDriver& driver_;
  void* library_ = nullptr;
};

}  // namespace epd::bench
