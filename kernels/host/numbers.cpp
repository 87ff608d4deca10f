#include "kernels/numbers.h"

#include "host/row_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace epd::kernels {
namespace {

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kExponent = 0x7f800000u;
constexpr std::uint32_t kMinNormalExponent = 121u << 23;  // 2^-6
constexpr std::uint32_t kRoundingShift = 20u << 23;       // float32 keeps 20 mantissa bits more than e4m3

}  // namespace

std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & ~kSign;
  if (magnitude > kExponent) return 0x7f;
  const auto sign = static_cast<std::uint8_t>((bits & kSign) >> 24);
  if (magnitude >= std::bit_cast<std::uint32_t>(kE4m3Max)) return sign | 0x7e;
  // Adding 2^(e+20) leaves no bit below 2^(e-3), which is e4m3's step at exponent e. So the addition itself
  // rounds to nearest even, and the low bits of the sum are the number of steps. Subnormals use the smallest
  // normal exponent.
  const std::uint32_t exponent = std::max(magnitude & kExponent, kMinNormalExponent);
  const std::uint32_t shifter = exponent + kRoundingShift;
  const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(shifter);
  const std::uint32_t steps = std::bit_cast<std::uint32_t>(sum) - shifter;
  return static_cast<std::uint8_t>(sign | (((exponent - kMinNormalExponent) >> 20) + steps));
}

float e4m3_to_float(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 0xf;
  const int mantissa = bits & 0x7;
  const bool negative = (bits & 0x80) != 0;
  float magnitude = 0;
  if ((bits & 0x7f) == 0x7f) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -9);
  } else {
    magnitude = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  }
  return negative ? -magnitude : magnitude;
}

namespace {

float cast_one_block(const std::uint16_t* x, bool pow2, std::uint8_t* q) {
  float scale = 0;
  void* const destination = q;
  host::best_row_kernels().cast_row({x, kScaleBlock, &scale, pow2}, {&destination, 1}, host::Stores::kCached);
  return scale;
}

}  // namespace

float cast_block_e4m3(const std::uint16_t* x, std::uint8_t* q) {
  return cast_one_block(x, false, q);
}

float cast_block_e4m3_pow2(const std::uint16_t* x, std::uint8_t* q) {
  return cast_one_block(x, true, q);
}

float host::cast_special_block(std::span<const std::uint16_t> x, bool pow2, std::uint8_t* q) {
  float amax = kMinAmax;
  for (const std::uint16_t bits : x) {
    const float magnitude = std::fabs(bf16_to_float(bits));
    if (magnitude > amax) amax = magnitude;  // false for NaN
  }
  const BlockScale scale = block_scale(amax, pow2);
  for (std::size_t i = 0; i < x.size(); ++i) q[i] = float_to_e4m3(bf16_to_float(x[i]) * scale.inverse);
  return scale.scale;
}

}  // namespace epd::kernels
