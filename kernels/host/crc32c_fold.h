// CRC-32C of bytes that pass through registers, for code that stores them anyway: 256 bytes are moved over
// the next, and added to them, until 256 are left that have the same CRC. For processors with wide products
// without carries.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace epd::kernels::host {

inline constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

constexpr std::uint32_t times_x(std::uint32_t value) {
  return value >> 1 ^ (kPolynomial & (0 - (value & 1)));
}
// x to the power of `bits`, reflected.
constexpr std::uint32_t power_of_x(std::size_t bits) {
  std::uint32_t value = 0x80000000;
  for (std::size_t i = 0; i < bits; ++i) value = times_x(value);
  return value;
}

#if defined(__x86_64__)

#define EPD_CRC32C_FOLD __attribute__((target("avx512f,vpclmulqdq"), always_inline)) inline

class Crc32cFold {
 public:
  static constexpr std::size_t kBytes = 256;

  // `before` is the complement of the CRC of the bytes before.
  EPD_CRC32C_FOLD explicit Crc32cFold(std::uint32_t before)
      : before_(_mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(before)))) {}

  EPD_CRC32C_FOLD void add(const __m512i (&next)[4]) {
    a_ = _mm512_xor_si512(folded(a_, next[0]), before_);
    b_ = folded(b_, next[1]);
    c_ = folded(c_, next[2]);
    d_ = folded(d_, next[3]);
    before_ = _mm512_setzero_si512();
  }
  // 256 bytes that have the same CRC as all that were added, if 0 is the complement of the CRC before them.
  EPD_CRC32C_FOLD void store(std::byte (&left)[kBytes]) const {
    _mm512_storeu_si512(left, a_);
    _mm512_storeu_si512(left + 64, b_);
    _mm512_storeu_si512(left + 128, c_);
    _mm512_storeu_si512(left + 192, d_);
  }

 private:
  // The instruction multiplies two reflected values, and the product lacks one factor x. crc32 multiplies by
  // x^32. kFirst is for the first 8 bytes of a piece of 16, kLast for its last 8.
  static constexpr long long kFirst = power_of_x(8 * kBytes + 64 - 33);
  static constexpr long long kLast = power_of_x(8 * kBytes - 33);

  EPD_CRC32C_FOLD static __m512i folded(__m512i value, __m512i next) {
    const __m512i by = _mm512_set4_epi64(kLast, kFirst, kLast, kFirst);
    const __m512i first = _mm512_clmulepi64_epi128(value, by, 0x00);
    const __m512i last = _mm512_clmulepi64_epi128(value, by, 0x11);
    return _mm512_ternarylogic_epi64(first, last, next, 0x96);  // the sum of the three
  }

  __m512i a_ = {};
  __m512i b_ = {};
  __m512i c_ = {};
  __m512i d_ = {};
  __m512i before_;
};

#endif

}  // namespace epd::kernels::host
