// Division by a number that is known before a kernel starts.
#pragma once

#include "kernels/host_device.h"

#include <cstdint>

namespace epd::kernels {

// Divides by a multiplication: the quotient is the upper half of a product. A GPU takes two instructions for
// this and twenty for a division. The result is exact for dividends below 2^32 / divisor. Only hosts make
// divisors, since that takes a division.
class Divisor {
 public:
  constexpr Divisor() = default;  // divides by 1
  constexpr explicit Divisor(std::uint32_t divisor) : factor_(divisor <= 1 ? 0 : ~0u / divisor + 1) {}

  EPD_HOST_DEVICE constexpr friend std::uint32_t operator/(std::uint32_t dividend, Divisor divisor) {
    if (divisor.factor_ == 0) return dividend;
#ifdef __CUDA_ARCH__
    return __umulhi(dividend, divisor.factor_);
#else
    return static_cast<std::uint32_t>(std::uint64_t{dividend} * divisor.factor_ >> 32);
#endif
  }

 private:
  std::uint32_t factor_ = 0;  // 2^32 / divisor, rounded up; 0: the divisor is 1
};

}  // namespace epd::kernels
