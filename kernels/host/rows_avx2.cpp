// The path for x86-64-v3. The functions carry their target as an attribute, so nothing else in the program is
// compiled for it.
#if defined(__x86_64__)

#include "host/row_kernels.h"
#include "kernels/numbers.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define EPD_PATH __attribute__((target("avx2,fma")))
#define EPD_PATH_INLINE static inline __attribute__((target("avx2,fma"), always_inline))

namespace epd::kernels::host {
namespace {

using Ints = __m256i;
using Floats = __m256;

EPD_PATH_INLINE __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <Stores kStores>
EPD_PATH_INLINE void put(void* place, __m256i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm256_stream_si256(static_cast<__m256i*>(place), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(place), value);
  }
}

EPD_PATH_INLINE __m256i upper_halves(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}

// Rounds to bf16 in the upper halves. The lower halves are undefined.
EPD_PATH_INLINE __m256i round_upper(__m256 sum) {
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}

// Rounds to bf16, as float. All NaNs that occur here have an empty lower half: bf16's, the canonical one, the
// processor's own.
EPD_PATH_INLINE __m256 round_sum(__m256 sum) {
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_castsi256_ps(
      upper_halves(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd)));
}

EPD_PATH_INLINE __m256i round_result(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_upper(even), 16), round_upper(odd), 0xaa);
}

EPD_PATH_INLINE __m256 even_floats(__m256i y) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(y, 16));
}

EPD_PATH_INLINE __m256 odd_floats(__m256i y) {
  return _mm256_castsi256_ps(upper_halves(y));
}

EPD_PATH_INLINE __m256 broadcast(float value) {
  return _mm256_set1_ps(value);
}

EPD_PATH_INLINE __m256 multiply_add(__m256 a, __m256 b, __m256 c) {
  return _mm256_fmadd_ps(a, b, c);
}

template <bool kGrouped>
constexpr std::size_t kSumVectors = kGrouped ? 2 : 4;

#include "host/vector_rows.h"

// Turns 8 products into 16 * (e4m3 code of the magnitude + 1128), in 32-bit lanes.
EPD_PATH_INLINE __m256i scaled_codes(__m256 product) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(product), _mm256_set1_epi32(0x7fffffff));
  const __m256i exponent = _mm256_max_epi32(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x7f800000)),
                                            _mm256_set1_epi32(121 << 23));
  // 2^(e+20): see float_to_e4m3 for the rounding.
  const __m256i shifter = _mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23));
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(shifter));
  // The upper half has exponent << 7, the lower half the steps: the result is exponent * 128 + steps * 16.
  return _mm256_madd_epi16(_mm256_castps_si256(sum), _mm256_set1_epi32(0x00010010));
}

// Casts 16 finite bf16 to 16 codes in 16-bit lanes.
EPD_PATH_INLINE __m256i cast_16(__m256i x, __m256 inverse) {
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  const __m256 odd = _mm256_castsi256_ps(upper_halves(x));
  const __m256i low = scaled_codes(_mm256_mul_ps(even, inverse));
  const __m256i high = _mm256_slli_epi32(scaled_codes(_mm256_mul_ps(odd, inverse)), 16);
  const __m256i both = _mm256_blend_epi16(low, high, 0xaa);
  const __m256i codes = _mm256_srli_epi16(_mm256_sub_epi16(both, _mm256_set1_epi16(16 * 8 * (121 + 20))), 4);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(0x80));
  return _mm256_or_si256(codes, sign);
}

EPD_PATH_INLINE __m256i cast_32(__m256i a, __m256i b, __m256 inverse) {
  const __m256i packed = _mm256_packus_epi16(cast_16(a, inverse), cast_16(b, inverse));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

EPD_PATH_INLINE std::uint32_t largest_magnitude(const std::uint16_t* x) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i largest = _mm256_setzero_si256();
  for (std::uint32_t i = 0; i < kScaleBlock; i += 16) {
    largest = _mm256_max_epu16(largest, _mm256_and_si256(load(x + i), magnitude));
  }
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  const __m128i inverted = _mm_xor_si128(half, _mm_set1_epi32(-1));
  return 0xffffu - static_cast<std::uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

template <Stores kStores>
EPD_PATH void cast_to_all(const CastRow& row, std::span<void* const> destinations) {
  float* scales = row.scales;
  const std::size_t whole = row.hidden / kScaleBlock * kScaleBlock;
  for (std::size_t start = 0; start < whole; start += kScaleBlock) {
    const std::uint16_t* block = row.x + start;
    for (std::size_t i = 0; i < kScaleBlock; i += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(block + i) + kCastAhead, _MM_HINT_T0);
    }
    const std::uint32_t largest = largest_magnitude(block);
    if (largest >= 0x7f80) [[unlikely]] {
      std::uint8_t q[kScaleBlock];
      *scales++ = cast_special_block({block, kScaleBlock}, row.pow2, q);
      for (void* destination : destinations) {
        std::uint8_t* place = static_cast<std::uint8_t*>(destination) + start;
        for (std::uint32_t i = 0; i < kScaleBlock; i += 32) put<kStores>(place + i, load(q + i));
      }
      continue;
    }
    const float amax = std::max(bf16_to_float(static_cast<std::uint16_t>(largest)), kMinAmax);
    const BlockScale scale = block_scale(amax, row.pow2);
    const __m256 inverse = _mm256_set1_ps(scale.inverse);
    __m256i codes[4];
    for (std::size_t i = 0; i < 4; ++i)
      codes[i] = cast_32(load(block + 32 * i), load(block + 32 * i + 16), inverse);
    for (void* destination : destinations) {
      std::uint8_t* place = static_cast<std::uint8_t*>(destination) + start;
      for (std::size_t i = 0; i < 4; ++i) put<kStores>(place + 32 * i, codes[i]);
    }
    *scales++ = scale.scale;
  }
  cast_rest(row, whole, destinations);
}

}  // namespace

const RowKernels kAvx2RowKernels = {"avx2", copy_row, cast_row, sum_rows, store_fence};

}  // namespace epd::kernels::host

#endif
