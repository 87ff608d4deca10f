#include "fake_cuda/bench_kernels.h"

#include "fake_cuda/memory.h"

#include "bench/gemm.h"

#include <cstring>

namespace epd::fake_cuda {
namespace {

template <typename T>
T parameter(void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(T));
  return value;
}

}  // namespace

Stream::Work gemm_kernel(unsigned columns_of_ctas, unsigned rows_of_ctas, void** parameters) {
  const std::size_t rows = std::size_t{rows_of_ctas} * bench::kGemmTile;
  const std::size_t columns = std::size_t{columns_of_ctas} * bench::kGemmTile;
  const auto n = parameter<std::uint32_t>(parameters, 3);
  const auto k = parameter<std::uint32_t>(parameters, 4);
  struct Matrix {
    const void* begin;
    std::size_t bytes;
  };
  const std::array<Matrix, 3> matrices{Matrix{parameter<const void*>(parameters, 0), rows * k * 2},
                                       Matrix{parameter<const void*>(parameters, 1), std::size_t{k} * n * 2},
                                       Matrix{parameter<const void*>(parameters, 2), rows * n * 4}};
  return [matrices, tiled = columns == n && k % bench::kGemmDepth == 0](Stream& stream) {
    bool good = tiled;
    for (const Matrix& matrix : matrices)
      good = good && memory().accessible(stream.device().ordinal, matrix.begin, matrix.bytes);
    if (good) return true;
    complain(std::string(kGemmKernel) + ": a matrix is no whole number of tiles, or not mapped for device " +
             std::to_string(stream.device().machine));
    stream.device().fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    return false;
  };
}

}  // namespace epd::fake_cuda
