// BF16 and e4m3 as bits, and the one definition of the FP8 block cast.
#pragma once

#include <bit>
#include <cstdint>

namespace epd::kernels {

inline constexpr std::uint32_t kScaleBlock = 128;
inline constexpr float kE4m3Max = 448.0f;
// A block whose largest magnitude is smaller is scaled as if it were this one. So neither 448/amax nor
// amax/448 leaves float32's normal range.
inline constexpr float kMinAmax = 1e-30f;

inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Rounds to nearest, ties to even. Every NaN becomes 0x7fc0: which payload survives an addition depends on
// the compiler's order of operands, and results are defined to the last bit.
inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounds to nearest, ties to even, saturating at +-448. NaN becomes 0x7f without its sign.
std::uint8_t float_to_e4m3(float value);
float e4m3_to_float(std::uint8_t bits);

// Casts one block of 128 BF16 values and returns the scale. amax = max |x| (NaN ignored), at least kMinAmax;
// scale = amax / 448; q = e4m3(x * (448 / amax)).
float cast_block_e4m3(const std::uint16_t* x, std::uint8_t* q);

// Casts with a power of two as scale: the least 2^e >= amax / 448, or Inf for an infinite amax. q = e4m3(x *
// 2^-e), with 2^-e = 0 for an infinite scale.
float cast_block_e4m3_pow2(const std::uint16_t* x, std::uint8_t* q);

// Returns the exponent byte of a power of two: e + 127; Inf gives 255.
inline std::uint8_t scale_to_ue8m0(float scale) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> 23);
}

}  // namespace epd::kernels
