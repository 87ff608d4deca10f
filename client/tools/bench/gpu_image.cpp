#include "gpu_image.h"

#include "kit/error.h"

#include <string>

#ifdef EPD_BENCH_HAS_KERNELS
extern "C" const unsigned char epd_bench_image[];
#endif

namespace epd::bench {

GpuImage::GpuImage(const GpuDriver& driver) : driver_(driver) {
#ifdef EPD_BENCH_HAS_KERNELS
  driver_.require(driver_.load(&library_, epd_bench_image, nullptr, nullptr, 0, nullptr, nullptr, 0),
                  "loading epbench's kernels");
#else
  kit::fail("epbench was built without nvcc");
#endif
}

void* GpuImage::kernel(const char* name) const {
  void* kernel = nullptr;
  driver_.require(driver_.kernel(&kernel, library_, name),
                  (std::string("finding the kernel ") + name).c_str());
  return kernel;
}

void GpuImage::launch(void* kernel, const Grid& grid, void* stream, void** arguments) const {
  driver_.require(driver_.launch(kernel, grid.ctas[0], grid.ctas[1], grid.batch, grid.threads, 1, 1,
                                 grid.shared_bytes, stream, arguments, nullptr),
                  "cuLaunchKernel");
}

}  // namespace epd::bench
