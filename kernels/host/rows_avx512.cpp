// The path for x86-64-v4. The functions carry their target as an attribute, so nothing else in the program is
// compiled for it.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 header warns about its helpers for undefined values (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "host/crc32c_fold.h"
#include "host/row_kernels.h"
#include "kernels/crc32c.h"
#include "kernels/numbers.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define EPD_PATH __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define EPD_AVX512_CRC __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,vpclmulqdq")))
#define EPD_PATH_INLINE \
  static inline __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"), always_inline))

namespace epd::kernels::host {
namespace {

using Ints = __m512i;
using Floats = __m512;

EPD_PATH_INLINE __m512i load(const void* p) {
  return _mm512_loadu_si512(p);
}

template <Stores kStores>
EPD_PATH_INLINE void put(void* place, __m512i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm512_stream_si512(static_cast<__m512i*>(place), value);
  } else {
    _mm512_storeu_si512(place, value);
  }
}

// Rounds to bf16 in the upper halves. The lower halves are undefined.
EPD_PATH_INLINE __m512i round_upper(__m512 sum) {
  const __m512i bits = _mm512_castps_si512(sum);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}

// Rounds to bf16, as float. All NaNs that occur here have an empty lower half: bf16's, the canonical one, the
// processor's own.
EPD_PATH_INLINE __m512 round_sum(__m512 sum) {
  const __m512i bits = _mm512_castps_si512(sum);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

EPD_PATH_INLINE __m512i round_result(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(round_upper(even), 16), round_upper(odd));
}

EPD_PATH_INLINE __m512 even_floats(__m512i y) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(y, 16));
}

EPD_PATH_INLINE __m512 odd_floats(__m512i y) {
  return _mm512_castsi512_ps(_mm512_and_si512(y, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

EPD_PATH_INLINE __m512 broadcast(float value) {
  return _mm512_set1_ps(value);
}

EPD_PATH_INLINE __m512 multiply_add(__m512 a, __m512 b, __m512 c) {
  return _mm512_fmadd_ps(a, b, c);
}

template <bool kGrouped>
constexpr std::size_t kSumVectors = 4;

#include "host/vector_rows.h"

// Turns 16 products times 8 into codes, each in byte 1 of its 32-bit lane. The sign is lost; the other bits
// are undefined. It rounds as float_to_e4m3 does, with sign(p) * 2^(e+20) as the shifter. The factor 8 makes
// the smallest exponent field of the shifter 144, and 144 * 8 = 0 mod 128, so the exponent needs no
// subtraction.
EPD_PATH_INLINE __m512i codes_in_byte_1(__m512 product) {
  constexpr int kMaxMagnitudeSignOfFirst = 0x3;
  const __m512 bounded = _mm512_range_ps(product, _mm512_set1_ps(0x1p-3f), kMaxMagnitudeSignOfFirst);
  const __m512i exponent =
      _mm512_and_si512(_mm512_castps_si512(bounded), _mm512_set1_epi32(static_cast<int>(0xff800000u)));
  const __m512i shifter = _mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(product, _mm512_castsi512_ps(shifter)));
  // The upper half has field << 7, the lower half the steps: the result is (field * 8 + steps) * 256.
  return _mm512_madd_epi16(sum, _mm512_set1_epi32(0x00100100));
}

// Casts 2 x 32 finite bf16 to 64 codes. Each 128-bit lane has 8 bytes of `a`, then 8 of `b`.
EPD_PATH_INLINE __m512i cast_64(__m512i a, __m512i b, __m512 inverse_times_8) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 a_even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  const __m512 a_odd = _mm512_castsi512_ps(_mm512_and_si512(a, upper));
  const __m512 b_even = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
  const __m512 b_odd = _mm512_castsi512_ps(_mm512_and_si512(b, upper));
  const __m512i gather =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 1, 5, 5, 9, 9, 13, 13, 1, 1, 5, 5, 9, 9, 13, 13));
  __m512i codes = _mm512_shuffle_epi8(codes_in_byte_1(_mm512_mul_ps(a_even, inverse_times_8)), gather);
  codes = _mm512_mask_shuffle_epi8(codes, 0x00aa00aa00aa00aaull,
                                   codes_in_byte_1(_mm512_mul_ps(a_odd, inverse_times_8)), gather);
  codes = _mm512_mask_shuffle_epi8(codes, 0x5500550055005500ull,
                                   codes_in_byte_1(_mm512_mul_ps(b_even, inverse_times_8)), gather);
  codes = _mm512_mask_shuffle_epi8(codes, 0xaa00aa00aa00aa00ull,
                                   codes_in_byte_1(_mm512_mul_ps(b_odd, inverse_times_8)), gather);
  // Saturated bytes keep the signs, in the same order as the codes.
  const __m512i signs = _mm512_packs_epi16(a, b);
  constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x7f), codes, signs, kSelect);
}

EPD_PATH_INLINE std::uint32_t largest_u16(__m512i v) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i inverted = _mm_xor_si128(quarter, _mm_set1_epi32(-1));
  return 0xffffu - static_cast<std::uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

template <Stores kStores>
EPD_PATH void cast_to_all(const CastRow& row, std::span<void* const> destinations) {
  float* scales = row.scales;
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const std::size_t whole = row.hidden / kScaleBlock * kScaleBlock;
  for (std::size_t start = 0; start < whole; start += kScaleBlock) {
    for (std::size_t i = 0; i < kScaleBlock; i += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(row.x + start + i) + kCastAhead, _MM_HINT_T0);
    }
    const __m512i x0 = _mm512_loadu_si512(row.x + start);
    const __m512i x1 = _mm512_loadu_si512(row.x + start + 32);
    const __m512i x2 = _mm512_loadu_si512(row.x + start + 64);
    const __m512i x3 = _mm512_loadu_si512(row.x + start + 96);
    const __m512i m01 = _mm512_max_epu16(_mm512_and_si512(x0, magnitude), _mm512_and_si512(x1, magnitude));
    const __m512i m23 = _mm512_max_epu16(_mm512_and_si512(x2, magnitude), _mm512_and_si512(x3, magnitude));
    const std::uint32_t largest = largest_u16(_mm512_max_epu16(m01, m23));
    __m512i front;
    __m512i back;
    if (largest >= 0x7f80) [[unlikely]] {
      std::uint8_t q[kScaleBlock];
      *scales++ = cast_special_block({row.x + start, kScaleBlock}, row.pow2, q);
      front = _mm512_loadu_si512(q);
      back = _mm512_loadu_si512(q + 64);
    } else {
      const float amax = std::max(bf16_to_float(static_cast<std::uint16_t>(largest)), kMinAmax);
      const BlockScale scale = block_scale(amax, row.pow2);
      const __m512 inverse_times_8 = _mm512_set1_ps(scale.inverse * 8.0f);
      front = _mm512_permutexvar_epi64(order, cast_64(x0, x1, inverse_times_8));
      back = _mm512_permutexvar_epi64(order, cast_64(x2, x3, inverse_times_8));
      *scales++ = scale.scale;
    }
    for (void* destination : destinations) {
      auto* place = static_cast<std::uint8_t*>(destination) + start;
      put<kStores>(place, front);
      put<kStores>(place + 64, back);
    }
  }
  cast_rest(row, whole, destinations);
}

// The CRC of `fold`, which began with ~0, and of the bytes after it.
EPD_AVX512_CRC std::uint32_t crc_of(const Crc32cFold& fold, const void* rest, std::size_t bytes) {
  std::byte left[Crc32cFold::kBytes];
  fold.store(left);
  return crc32c({static_cast<const std::byte*>(rest), bytes}, crc32c(left, ~std::uint32_t{0}));
}

struct StoringWithCrc {
  template <bool kWeighted, bool kPartial, bool kDomains>
  EPD_AVX512_CRC static std::uint32_t sum(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
    constexpr std::size_t kVectors = kSumVectors < kPartial || kDomains > ;
    const std::size_t whole = hidden / (kVectors * kColumns) * (kVectors * kColumns);
    Crc32cFold fold(~std::uint32_t{0});
    for (std::size_t start = 0; start < whole; start += kVectors * kColumns) {
      Ints sums[kVectors];
      sum_block<kWeighted, kPartial, kDomains>(sum, start, sums);
      for (std::size_t v = 0; v < kVectors; ++v) put<Stores::kCached>(out + start + v * kColumns, sums[v]);
      fold.add(sums);
    }
    sum_rest(sum, whole, hidden, out);
    const std::size_t rest = (hidden - whole) * sizeof(*out);
    return whole == 0 ? crc32c(std::as_bytes(std::span(out, hidden))) : crc_of(fold, out + whole, rest);
  }
};

EPD_AVX512_CRC std::uint32_t copy_row_crc(const void* source, std::size_t bytes, void* destination) {
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(destination);
  Crc32cFold fold(~std::uint32_t{0});
  std::size_t i = 0;
  for (; i + Crc32cFold::kBytes <= bytes; i += Crc32cFold::kBytes) {
    const __m512i row[] = {_mm512_loadu_si512(from + i), _mm512_loadu_si512(from + i + 64),
                           _mm512_loadu_si512(from + i + 128), _mm512_loadu_si512(from + i + 192)};
    for (std::size_t v = 0; v < 4; ++v) put<Stores::kCached>(to + i + v * 64, row[v]);
    fold.add(row);
  }
  std::memcpy(to + i, from + i, bytes - i);
  return i == 0 ? crc32c({to, bytes}) : crc_of(fold, to + i, bytes - i);
}

}  // namespace

const RowKernels kAvx512RowKernels = {"avx512", copy_row, cast_row, sum_rows, store_fence};
const RowKernels kAvx512CrcRowKernels = {
    "avx512_crc", copy_row, cast_row, sum_rows, store_fence, copy_row_crc, sum_any<StoringWithCrc>};

}  // namespace epd::kernels::host

#endif
