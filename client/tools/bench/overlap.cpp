#include "overlap.h"

#include "bench/gemm.h"

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

Gemm::Gemm(const GpuRank& gpu, std::uint32_t rows)
    : driver_(gpu_driver()), rows_(rows), image_(driver_), kernel_(image_.kernel("bench_gemm")) {
  const std::size_t inputs = (std::size_t{rows_} + kColumns) * kDepth * 2;
  const std::size_t bytes = inputs + std::size_t{rows_} * kColumns * 4;
  driver_.require(driver_.allocate(&memory_, bytes), "cuMemAlloc for the GEMM");
  driver_.require(driver_.fill(memory_, 0, bytes, gpu.stream()), "cuMemsetD8Async");
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
  GemmStrides one{};
  void* arguments[] = {&a, &b, &c, &n, &k, &one};
  image_.launch(kernel_, {.ctas = {kColumns / kGemmTile, rows_ / kGemmTile}, .threads = kGemmThreads}, stream,
                arguments);
}

}  // namespace epd::bench
