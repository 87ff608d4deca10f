#include "model.h"

#include <bit>
#include <cstring>

// One copy of a function for each generation of vector units, chosen when the program starts. Sanitizers
// can't run the chooser that early.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define EPD_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EPD_VECTOR_CLONES
#endif

namespace epd::demo {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kBlock = 4;  // rows of a times rows of b in registers

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

}  // namespace

EPD_VECTOR_CLONES
void multiply_transposed(const MultiplyShape& shape, const float* a, const float* b, float* out) {
  for (std::size_t i = 0; i < shape.m; i += kBlock) {
    for (std::size_t j = 0; j < shape.n; j += kBlock) {
      // Rows past the end repeat the last one; their sums are not stored.
      const float* a_rows[kBlock];
      const float* b_rows[kBlock];
      for (std::size_t r = 0; r < kBlock; ++r) {
        a_rows[r] = a + (i + r < shape.m ? i + r : shape.m - 1) * shape.k;
        b_rows[r] = b + (j + r < shape.n ? j + r : shape.n - 1) * shape.k;
      }
      Vector sums[kBlock][kBlock] = {};
      for (std::size_t k = 0; k < shape.k; k += kLanes) {
        Vector left[kBlock];
        for (std::size_t r = 0; r < kBlock; ++r) std::memcpy(&left[r], a_rows[r] + k, sizeof(Vector));
        for (std::size_t c = 0; c < kBlock; ++c) {
          Vector right;
          std::memcpy(&right, b_rows[c] + k, sizeof(Vector));
          for (std::size_t r = 0; r < kBlock; ++r) sums[r][c] += left[r] * right;
        }
      }
      for (std::size_t r = 0; r < kBlock && i + r < shape.m; ++r) {
        for (std::size_t c = 0; c < kBlock && j + c < shape.n; ++c) {
          float sum = 0.0f;
          for (std::size_t lane = 0; lane < kLanes; ++lane) sum += sums[r][c][lane];
          out[(i + r) * shape.n + j + c] = sum;
        }
      }
    }
  }
}

EPD_VECTOR_CLONES
void add_scaled_rows(const float* factors, const std::uint16_t* rows, std::size_t count, std::size_t hidden,
                     float* out) {
  auto value = [](std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); };
  for (std::size_t j = 0; j < count; j += kBlock) {
    const std::uint16_t* row0 = rows + j * hidden;
    const std::uint16_t* row1 = row0 + hidden;
    const std::uint16_t* row2 = row1 + hidden;
    const std::uint16_t* row3 = row2 + hidden;
    const float f0 = factors[j], f1 = factors[j + 1], f2 = factors[j + 2], f3 = factors[j + 3];
    for (std::size_t h = 0; h < hidden; ++h) {
      out[h] += f0 * value(row0[h]) + f1 * value(row1[h]) + f2 * value(row2[h]) + f3 * value(row3[h]);
    }
  }
}

}  // namespace epd::demo
