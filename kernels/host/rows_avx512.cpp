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

#define EPD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define EPD_AVX512_CRC __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,vpclmulqdq")))
#define EPD_AVX512_INLINE \
  static inline __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"), always_inline))

namespace epd::kernels::host {
namespace {

bool is_line_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}

bool can_stream(std::span<void* const> destinations, Stores stores) {
  return stores == Stores::kStreaming && std::all_of(destinations.begin(), destinations.end(),
                                                     [](const void* p) { return is_line_aligned(p); });
}

template <Stores kStores>
EPD_AVX512_INLINE void put(void* place, __m512i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm512_stream_si512(static_cast<__m512i*>(place), value);
  } else {
    _mm512_storeu_si512(place, value);
  }
}

template <Stores kStores>
EPD_AVX512_INLINE void put(void* place, __m128i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm_stream_si128(static_cast<__m128i*>(place), value);
  } else {
    _mm_storeu_si128(static_cast<__m128i*>(place), value);
  }
}

template <Stores kStores>
EPD_AVX512 void copy_to_all(const char* source, std::size_t bytes, std::span<void* const> destinations) {
  std::size_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    const __m512i a = _mm512_loadu_si512(source + i);
    const __m512i b = _mm512_loadu_si512(source + i + 64);
    for (void* destination : destinations) {
      char* place = static_cast<char*>(destination) + i;
      put<kStores>(place, a);
      put<kStores>(place + 64, b);
    }
  }
  for (; i + 16 <= bytes; i += 16) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    for (void* destination : destinations) put<kStores>(static_cast<char*>(destination) + i, value);
  }
  for (void* destination : destinations)
    std::memcpy(static_cast<char*>(destination) + i, source + i, bytes - i);
}

// Copies a row that begins or ends within a cache line. Whole lines of the row bypass the caches.
EPD_AVX512 void stream_inner_lines(const char* source, std::size_t bytes, char* destination) {
  const std::size_t head = std::min<std::size_t>(bytes, -reinterpret_cast<std::uintptr_t>(destination) % 64);
  const std::size_t inner_end = head + (bytes - head) / 64 * 64;
  std::memcpy(destination, source, head);
  for (std::size_t i = head; i < inner_end; i += 64)
    put<Stores::kStreaming>(destination + i, _mm512_loadu_si512(source + i));
  std::memcpy(destination + inner_end, source + inner_end, bytes - inner_end);
}

void copy_row(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores stores) {
  const auto* from = static_cast<const char*>(source);
  if (can_stream(destinations, stores)) {
    copy_to_all<Stores::kStreaming>(from, bytes, destinations);
  } else if (stores == Stores::kStreaming) {
    for (void* destination : destinations) stream_inner_lines(from, bytes, static_cast<char*>(destination));
  } else {
    for (void* destination : destinations) std::memcpy(destination, from, bytes);
  }
}

// Turns 16 products times 8 into codes, each in byte 1 of its 32-bit lane. The sign is lost; the other bits
// are undefined. It rounds as float_to_e4m3 does, with sign(p) * 2^(e+20) as the shifter. The factor 8 makes
// the smallest exponent field of the shifter 144, and 144 * 8 = 0 mod 128, so the exponent needs no
// subtraction.
EPD_AVX512_INLINE __m512i codes_in_byte_1(__m512 product) {
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
EPD_AVX512_INLINE __m512i cast_64(__m512i a, __m512i b, __m512 inverse_times_8) {
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

EPD_AVX512_INLINE std::uint32_t largest_u16(__m512i v) {
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i inverted = _mm_xor_si128(quarter, _mm_set1_epi32(-1));
  return 0xffffu - static_cast<std::uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

template <Stores kStores>
EPD_AVX512 void cast_to_all(const CastRow& row, std::span<void* const> destinations) {
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

void cast_row(const CastRow& row, std::span<void* const> destinations, Stores stores) {
  if (can_stream(destinations, stores)) {
    cast_to_all<Stores::kStreaming>(row, destinations);
  } else {
    cast_to_all<Stores::kCached>(row, destinations);
  }
}

// Rounds to bf16 in the upper halves. The lower halves are undefined.
EPD_AVX512_INLINE __m512i round_upper(__m512 sum) {
  const __m512i bits = _mm512_castps_si512(sum);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}

template <bool kWeighted>
EPD_AVX512_INLINE __m512 accumulate(__m512 sum, __m512 value, __m512 weight) {
  if constexpr (kWeighted) return _mm512_fmadd_ps(weight, value, sum);
  return _mm512_add_ps(sum, value);
}

// Sums of 128 columns.
constexpr std::size_t kVectors = 4;  // of 32 bf16
struct Columns {
  __m512 even[kVectors];
  __m512 odd[kVectors];
};

template <bool kWeighted, bool kPrefetch>
EPD_AVX512_INLINE void add_row(Columns& sums, const WeightedRow& source, std::size_t start) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 weight = _mm512_set1_ps(source.weight);
  for (std::size_t v = 0; v < kVectors; ++v) {
    const std::uint16_t* columns = source.row + start + v * 32;
    if constexpr (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(columns) + kSumAhead, _MM_HINT_T0);
    const __m512i y = _mm512_loadu_si512(columns);
    sums.even[v] = accumulate<kWeighted>(sums.even[v], _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), weight);
    sums.odd[v] = accumulate<kWeighted>(sums.odd[v], _mm512_castsi512_ps(_mm512_and_si512(y, upper)), weight);
  }
}

EPD_AVX512_INLINE void clear(Columns& sums) {
  for (std::size_t v = 0; v < kVectors; ++v) sums.even[v] = sums.odd[v] = _mm512_setzero_ps();
}

// Rounds to bf16, as float. All NaNs that occur here have an empty lower half: bf16's, the canonical one, the
// processor's own.
EPD_AVX512_INLINE __m512 rounded_partial_sum(__m512 sum) {
  const __m512i bits = _mm512_castps_si512(sum);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

EPD_AVX512_INLINE void add_rounded(Columns& sums, const Columns& partial) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    sums.even[v] = _mm512_add_ps(sums.even[v], rounded_partial_sum(partial.even[v]));
    sums.odd[v] = _mm512_add_ps(sums.odd[v], rounded_partial_sum(partial.odd[v]));
  }
}

template <bool kWeighted>
EPD_AVX512_INLINE void add_partial_sum(Columns& sums, std::span<const WeightedRow> rows, std::size_t start) {
  if (!kWeighted && rows.size() == 1) return add_row<false, true>(sums, rows[0], start);  // is bf16 already
  Columns partial;
  clear(partial);
  for (const WeightedRow& source : rows) add_row<kWeighted, true>(partial, source, start);
  add_rounded(sums, partial);
}

// So many summands, from `next` on.
template <bool kWeighted, bool kPartial>
EPD_AVX512_INLINE void add_summands(Columns& sums, Summands& next, std::uint32_t count, std::size_t start) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if constexpr (kPartial) {
      add_partial_sum<kWeighted>(sums, {next.row, *next.partial_sum}, start);
      next.row += *next.partial_sum++;
    } else {
      add_row<kWeighted, false>(sums, *next.row++, start);
    }
  }
}

template <bool kWeighted, bool kPartial>
EPD_AVX512_INLINE void add_domain(Columns& sums, Summands& next, const SumDomain& domain, std::size_t start) {
  const bool is_bf16 = domain.summands == 1 && (kPartial || !kWeighted);
  if (!domain.rounded || is_bf16)
    return add_summands<kWeighted, kPartial>(sums, next, domain.summands, start);
  Columns partial;
  clear(partial);
  add_summands<kWeighted, kPartial>(partial, next, domain.summands, start);
  add_rounded(sums, partial);
}

template <bool kWeighted, bool kPartial, bool kDomains>
EPD_AVX512_INLINE void sum_128_columns(const RowSum& sum, std::size_t start, __m512i (&out)[kVectors]) {
  Columns sums;
  clear(sums);
  if constexpr (kDomains) {
    Summands next{sum.rows.data(), sum.partial_sums.data()};
    for (const SumDomain& domain : sum.domains) add_domain<kWeighted, kPartial>(sums, next, domain, start);
  } else if constexpr (kPartial) {
    const WeightedRow* first = sum.rows.data();
    for (const std::uint32_t count : sum.partial_sums) {
      add_partial_sum<kWeighted>(sums, {first, count}, start);
      first += count;
    }
  } else {
    for (const WeightedRow& source : sum.rows) add_row<kWeighted, false>(sums, source, start);
  }
  for (std::size_t v = 0; v < kVectors; ++v) {
    const __m512i low = _mm512_srli_epi32(round_upper(sums.even[v]), 16);
    out[v] = _mm512_mask_blend_epi16(0xaaaaaaaau, low, round_upper(sums.odd[v]));
  }
}

constexpr std::size_t whole_columns(std::size_t hidden) {
  return hidden / (kVectors * 32) * (kVectors * 32);
}

template <Stores kStores>
struct Storing {
  template <bool kWeighted, bool kPartial, bool kDomains>
  EPD_AVX512 static void sum(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
    const std::size_t whole = whole_columns(hidden);
    for (std::size_t start = 0; start < whole; start += kVectors * 32) {
      __m512i sums[kVectors];
      sum_128_columns<kWeighted, kPartial, kDomains>(sum, start, sums);
      for (std::size_t v = 0; v < kVectors; ++v) put<kStores>(out + start + v * 32, sums[v]);
    }
    sum_rest(sum, whole, hidden, out);
  }
};

// The CRC of `fold`, which began with ~0, and of the bytes behind.
EPD_AVX512_CRC std::uint32_t crc_of(const Crc32cFold& fold, const void* rest, std::size_t bytes) {
  std::byte left[Crc32cFold::kBytes];
  fold.store(left);
  return crc32c({static_cast<const std::byte*>(rest), bytes}, crc32c(left, ~std::uint32_t{0}));
}

struct StoringWithCrc {
  template <bool kWeighted, bool kPartial, bool kDomains>
  EPD_AVX512_CRC static std::uint32_t sum(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
    const std::size_t whole = whole_columns(hidden);
    Crc32cFold fold(~std::uint32_t{0});
    for (std::size_t start = 0; start < whole; start += kVectors * 32) {
      __m512i sums[kVectors];
      sum_128_columns<kWeighted, kPartial, kDomains>(sum, start, sums);
      for (std::size_t v = 0; v < kVectors; ++v) put<Stores::kCached>(out + start + v * 32, sums[v]);
      fold.add(sums);
    }
    sum_rest(sum, whole, hidden, out);
    const std::size_t rest = (hidden - whole) * sizeof(*out);
    return whole == 0 ? crc32c(std::as_bytes(std::span(out, hidden))) : crc_of(fold, out + whole, rest);
  }
};

template <typename How>
auto sum_any(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
  const bool partial = !sum.partial_sums.empty();
  if (!sum.domains.empty()) {
    if (partial && sum.weighted) return How::template sum<true, true, true>(sum, hidden, out);
    if (partial) return How::template sum<false, true, true>(sum, hidden, out);
    if (sum.weighted) return How::template sum<true, false, true>(sum, hidden, out);
    return How::template sum<false, false, true>(sum, hidden, out);
  }
  if (partial && sum.weighted) return How::template sum<true, true, false>(sum, hidden, out);
  if (partial) return How::template sum<false, true, false>(sum, hidden, out);
  if (sum.weighted) return How::template sum<true, false, false>(sum, hidden, out);
  return How::template sum<false, false, false>(sum, hidden, out);
}

void sum_rows(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores stores) {
  if (stores == Stores::kStreaming && is_line_aligned(out))
    return sum_any<Storing<Stores::kStreaming>>(sum, hidden, out);
  return sum_any<Storing<Stores::kCached>>(sum, hidden, out);
}

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

void store_fence() {
  _mm_sfence();
}

}  // namespace

const RowKernels kAvx512RowKernels = {"avx512", copy_row, cast_row, sum_rows, store_fence};
const RowKernels kAvx512CrcRowKernels = {
    "avx512_crc", copy_row, cast_row, sum_rows, store_fence, copy_row_crc, sum_any<StoringWithCrc>};

}  // namespace epd::kernels::host

#endif
