#include "overlap.h"

#include "gemm.h"
#include "kit/error.h"

#include <string>

#ifdef EPD_BENCH_HAS_CEILING
extern "C" const unsigned char epd_ceiling_image[];
#endif

namespace epd::bench {
namespace {

constexpr std::uint32_t kColumns = 4096;
constexpr std::uint32_t kDepth = 7168;
constexpr std::uint32_t kManyRows = 4096;
constexpr std::uint32_t kFewRows = 512;
constexpr std::uint32_t kFewTokens = 1024;

}  // namespace

std::uint32_t gemm_rows(std::uint32_t tokens) {
  return tokens < kFewTokens ? kFewRows : kManyRows;
}

Gemm::Gemm(const GpuRank& gpu, std::uint32_t rows) : driver_(gpu_driver()), rows_(rows) {
#ifdef EPD_BENCH_HAS_CEILING
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
  int (*kernel)(void**, void*, const char*) = nullptr;
  const auto find = [this](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(driver_.find(symbol));
    if (function == nullptr) kit::fail(std::string("the driver has no ") + symbol);
  };
  find(load, "cuLibraryLoadData");
  find(kernel, "cuLibraryGetKernel");
  find(launch_, "cuLaunchKernel");
  driver_.require(load(&library_, epd_ceiling_image, nullptr, nullptr, 0, nullptr, nullptr, 0),
                  "loading the GEMM");
  driver_.require(kernel(&kernel_, library_, "bench_gemm"), "finding the GEMM in the driver");
  const std::size_t inputs = (std::size_t{rows_} + kColumns) * kDepth * 2;
  const std::size_t bytes = inputs + std::size_t{rows_} * kColumns * 4;
  driver_.require(driver_.allocate(&memory_, bytes), "cuMemAlloc for the GEMM");
  driver_.require(driver_.fill(memory_, 0, bytes, gpu.stream()), "cuMemsetD8Async");
  enqueue(gpu.stream());  // loaded now, and not when a kernel of the daemon's waits
#else
  static_cast<void>(gpu);
  kit::fail("epbench was built without nvcc");
#endif
}

Gemm::~Gemm() {
  if (memory_ != 0) driver_.free(memory_);
}

void Gemm::enqueue(void* stream) {
  GpuAddress a = memory_;
  GpuAddress b = a + std::size_t{rows_} * kDepth * 2;
  GpuAddress c = b + std::size_t{kColumns} * kDepth * 2;
  std::uint32_t n = kColumns;
  std::uint32_t k = kDepth;
  void* arguments[] = {&a, &b, &c, &n, &k};
  driver_.require(launch_(kernel_, kColumns / kGemmTile, rows_ / kGemmTile, 1, kGemmThreads, 1, 1, 0, stream,
                          arguments, nullptr),
                  "cuLaunchKernel of the GEMM");
}

}  // namespace epd::bench
