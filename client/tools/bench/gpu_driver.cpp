#include "gpu_driver.h"

#include "kit/error.h"
#include "kit/team.h"

#include <dlfcn.h>
#include <cstdlib>
#include <string>
#include <type_traits>

#ifdef EPD_BENCH_HAS_KERNELS
extern "C" const unsigned char epd_bench_image[];
#endif

namespace epd::bench {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr std::chrono::seconds kProbeLimit{120};

GpuDriver open_driver() {
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // loading a kernel while another waits for it never ends
  GpuDriver driver;
  driver.library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // never closed: it has its own threads
  if (driver.library == nullptr) {
    const char* why = ::dlerror();
    kit::fail(std::string("backend cuda needs NVIDIA's driver library: ") +
              (why != nullptr ? why : kLibrary));
  }
  const auto find = [&driver](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(driver.find(symbol));
    return function != nullptr;
  };
#define EPD_GPU_FIND(member, symbol, parameters) \
  if (!find(driver.member, symbol)) kit::fail(std::string(kLibrary) + " has no " symbol);
  EPD_GPU_FUNCTIONS(EPD_GPU_FIND)
#undef EPD_GPU_FIND
  if (!find(driver.elapsed, "cuEventElapsedTime_v2") && !find(driver.elapsed, "cuEventElapsedTime")) {
    kit::fail(std::string(kLibrary) + " has no cuEventElapsedTime");
  }
  driver.require(driver.init(0), "starting CUDA's driver");
  return driver;
}

}  // namespace

void* GpuDriver::find(const char* symbol) const {
  return ::dlsym(library, symbol);
}

void GpuDriver::require(int result, const char* what) const {
  if (result == 0) return;
  const char* name = nullptr;
  const bool known = error_name(result, &name) == 0 && name != nullptr;
  kit::fail(std::string(what) + ": " + (known ? name : "CUDA error " + std::to_string(result)));
}

const GpuDriver& gpu_driver() {
  static const GpuDriver driver = open_driver();
  return driver;
}

std::uint32_t count_gpus() {
  const kit::SharedArray<int> count(1);
  kit::Team team(1);
  kit::Team::Options options;
  options.limit = kProbeLimit;
  team.run(
      [&count](kit::TeamRank&) {
        const GpuDriver& driver = gpu_driver();
        driver.require(driver.device_count(count.data()), "counting GPUs");
      },
      options);
  if (count[0] <= 0) kit::fail("backend cuda: this process sees no GPU (CUDA_VISIBLE_DEVICES?)");
  return static_cast<std::uint32_t>(count[0]);
}

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
