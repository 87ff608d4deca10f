// Converts pairs of BF16 numbers, which share a 32-bit word, to float32.
#pragma once

#include <cstdint>

namespace epd::kernels::cuda {

__device__ inline float low_float(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_float(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

}  // namespace epd::kernels::cuda
