// fma for float, where the processor has no instruction and the library's function is slow. Internal.
#pragma once

#include <bit>
#include <cstdint>

namespace epd::kernels::host {

// Returns a * b + c with one rounding; which NaN it returns is undefined. The product is exact in double. So
// is the error of the addition (Knuth's two-sum; for Inf and NaN the error is NaN, which compares false). An
// inexact sum is rounded to odd: to the neighbour towards the exact value whose last bit is set. Double has
// more than two bits more than float, subnormal or not, so rounding the odd sum to float rounds the exact
// value. There are no branches, so compilers can vectorise it.
inline float fma_by_double(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double total = product + addend;
  const double addend_part = total - product;
  const double lost = (product - (total - addend_part)) + (addend - addend_part);
  const auto bits = std::bit_cast<std::uint64_t>(total);
  const std::uint64_t is_even = ~bits & 1;
  // The exact value is nearer to zero than the total.
  const std::uint64_t inwards = (bits ^ std::bit_cast<std::uint64_t>(lost)) >> 63;
  const std::uint64_t step = (lost < 0 || lost > 0) ? is_even : 0;
  return static_cast<float>(std::bit_cast<double>(bits + step - 2 * (step & inwards)));
}

}  // namespace epd::kernels::host
