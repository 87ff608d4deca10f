// fma for float where the processor has none and the library's is slow. Internal.
#pragma once

#include <bit>
#include <cstdint>

namespace epd::kernels::host {

// a * b + c, rounded once; which NaN is not defined. The product is exact in double, and so is what the
// addition loses (Knuth's two-sum; Inf and NaN lose NaN, which compares false). A sum that lost something is
// rounded to odd: to the neighbour towards the exact value whose last bit is set. Double has more than two
// bits more than float, subnormal or not, so that rounding an odd one to float rounds the exact value.
// Without branches, for vectors.
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
