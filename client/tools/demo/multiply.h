// The two loops in which the demo's arithmetic spends its time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epd::demo {

// out[i*n + j] = sum over k of a[i*k_size + k] * b[j*k_size + k]; float32. k_size: a multiple of 16.
// a: [m,k], b: [n,k], out: [m,n]
struct MultiplyShape {
  std::size_t m = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};
void multiply_transposed(const MultiplyShape& shape, const float* a, const float* b, float* out);

// out[h] += sum over j of factors[j] * rows[j*hidden + h]; rows: [count,hidden] bf16, count a multiple of 4.
void add_scaled_rows(const float* factors, const std::uint16_t* rows, std::size_t count, std::size_t hidden,
                     float* out);

}  // namespace epd::demo
