// The path for x86-64-v3. The functions carry their target as an attribute, so nothing else in the program is
// compiled for it.
#if defined(__x86_64__)

#include "host/row_kernels.h"
#include "kernels/numbers.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define EPD_AVX2 __attribute__((target("avx2,fma")))
#define EPD_AVX2_INLINE static inline __attribute__((target("avx2,fma"), always_inline))

namespace epd::kernels::host {
namespace {

bool is_line_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}

bool can_stream(std::span<void* const> destinations, Stores stores) {
  return stores == Stores::kStreaming && std::all_of(destinations.begin(), destinations.end(),
                                                     [](const void* p) { return is_line_aligned(p); });
}

EPD_AVX2_INLINE __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <Stores kStores>
EPD_AVX2_INLINE void put(void* place, __m256i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm256_stream_si256(static_cast<__m256i*>(place), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(place), value);
  }
}

EPD_AVX2_INLINE __m256i upper_halves(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}

template <Stores kStores>
EPD_AVX2_INLINE void put(void* place, __m128i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm_stream_si128(static_cast<__m128i*>(place), value);
  } else {
    _mm_storeu_si128(static_cast<__m128i*>(place), value);
  }
}

template <Stores kStores>
EPD_AVX2 void copy_to_all(const char* source, std::size_t bytes, std::span<void* const> destinations) {
  std::size_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    const __m256i a = load(source + i);
    const __m256i b = load(source + i + 32);
    const __m256i c = load(source + i + 64);
    const __m256i d = load(source + i + 96);
    for (void* destination : destinations) {
      char* place = static_cast<char*>(destination) + i;
      put<kStores>(place, a);
      put<kStores>(place + 32, b);
      put<kStores>(place + 64, c);
      put<kStores>(place + 96, d);
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
EPD_AVX2 void stream_inner_lines(const char* source, std::size_t bytes, char* destination) {
  const std::size_t head = std::min<std::size_t>(bytes, -reinterpret_cast<std::uintptr_t>(destination) % 64);
  const std::size_t inner_end = head + (bytes - head) / 64 * 64;
  std::memcpy(destination, source, head);
  for (std::size_t i = head; i < inner_end; i += 32)
    put<Stores::kStreaming>(destination + i, load(source + i));
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

// Turns 8 products into 16 * (e4m3 code of the magnitude + 1128), in 32-bit lanes.
EPD_AVX2_INLINE __m256i scaled_codes(__m256 product) {
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
EPD_AVX2_INLINE __m256i cast_16(__m256i x, __m256 inverse) {
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  const __m256 odd = _mm256_castsi256_ps(upper_halves(x));
  const __m256i low = scaled_codes(_mm256_mul_ps(even, inverse));
  const __m256i high = _mm256_slli_epi32(scaled_codes(_mm256_mul_ps(odd, inverse)), 16);
  const __m256i both = _mm256_blend_epi16(low, high, 0xaa);
  const __m256i codes = _mm256_srli_epi16(_mm256_sub_epi16(both, _mm256_set1_epi16(16 * 8 * (121 + 20))), 4);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(0x80));
  return _mm256_or_si256(codes, sign);
}

EPD_AVX2_INLINE __m256i cast_32(__m256i a, __m256i b, __m256 inverse) {
  const __m256i packed = _mm256_packus_epi16(cast_16(a, inverse), cast_16(b, inverse));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

EPD_AVX2_INLINE std::uint32_t largest_magnitude(const std::uint16_t* x) {
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
EPD_AVX2 void cast_to_all(const CastRow& row, std::span<void* const> destinations) {
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

void cast_row(const CastRow& row, std::span<void* const> destinations, Stores stores) {
  if (can_stream(destinations, stores)) {
    cast_to_all<Stores::kStreaming>(row, destinations);
  } else {
    cast_to_all<Stores::kCached>(row, destinations);
  }
}

// Rounds to bf16 in the upper halves. The lower halves are undefined.
EPD_AVX2_INLINE __m256i round_upper(__m256 sum) {
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}

template <bool kWeighted>
EPD_AVX2_INLINE __m256 accumulate(__m256 sum, __m256 value, __m256 weight) {
  if constexpr (kWeighted) return _mm256_fmadd_ps(weight, value, sum);
  return _mm256_add_ps(sum, value);
}

// Sums of kVectors times 16 columns.
template <std::size_t kVectors>
struct Columns {
  __m256 even[kVectors];
  __m256 odd[kVectors];
};

template <bool kWeighted, bool kPrefetch, std::size_t kVectors>
EPD_AVX2_INLINE void add_row(Columns<kVectors>& sums, const WeightedRow& source, std::size_t start) {
  const __m256 weight = _mm256_set1_ps(source.weight);
  if constexpr (kPrefetch) {
    static_assert(kVectors == 2);  // one cache line
    _mm_prefetch(reinterpret_cast<const char*>(source.row + start) + kSumAhead, _MM_HINT_T0);
  }
  for (std::size_t v = 0; v < kVectors; ++v) {
    const __m256i y = load(source.row + start + v * 16);
    sums.even[v] = accumulate<kWeighted>(sums.even[v], _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), weight);
    sums.odd[v] = accumulate<kWeighted>(sums.odd[v], _mm256_castsi256_ps(upper_halves(y)), weight);
  }
}

template <std::size_t kVectors>
EPD_AVX2_INLINE void clear(Columns<kVectors>& sums) {
  for (std::size_t v = 0; v < kVectors; ++v) sums.even[v] = sums.odd[v] = _mm256_setzero_ps();
}

// Rounds to bf16, as float. All NaNs that occur here have an empty lower half: bf16's, the canonical one, the
// processor's own.
EPD_AVX2_INLINE __m256 rounded_partial_sum(__m256 sum) {
  const __m256i bits = _mm256_castps_si256(sum);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_castsi256_ps(
      upper_halves(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd)));
}

template <std::size_t kVectors>
EPD_AVX2_INLINE void add_rounded(Columns<kVectors>& sums, const Columns<kVectors>& partial) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    sums.even[v] = _mm256_add_ps(sums.even[v], rounded_partial_sum(partial.even[v]));
    sums.odd[v] = _mm256_add_ps(sums.odd[v], rounded_partial_sum(partial.odd[v]));
  }
}

template <bool kWeighted, std::size_t kVectors>
EPD_AVX2_INLINE void add_partial_sum(Columns<kVectors>& sums, std::span<const WeightedRow> rows,
                                     std::size_t start) {
  if (!kWeighted && rows.size() == 1) return add_row<false, true>(sums, rows[0], start);  // is bf16 already
  Columns<kVectors> partial;
  clear(partial);
  for (const WeightedRow& source : rows) add_row<kWeighted, true>(partial, source, start);
  add_rounded(sums, partial);
}

// So many summands, from `next` on.
template <bool kWeighted, bool kPartial, std::size_t kVectors>
EPD_AVX2_INLINE void add_summands(Columns<kVectors>& sums, Summands& next, std::uint32_t count,
                                  std::size_t start) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if constexpr (kPartial) {
      add_partial_sum<kWeighted>(sums, {next.row, *next.partial_sum}, start);
      next.row += *next.partial_sum++;
    } else {
      add_row<kWeighted, false>(sums, *next.row++, start);
    }
  }
}

template <bool kWeighted, bool kPartial, std::size_t kVectors>
EPD_AVX2_INLINE void add_domain(Columns<kVectors>& sums, Summands& next, const SumDomain& domain,
                                std::size_t start) {
  const bool is_bf16 = domain.summands == 1 && (kPartial || !kWeighted);
  if (!domain.rounded || is_bf16)
    return add_summands<kWeighted, kPartial>(sums, next, domain.summands, start);
  Columns<kVectors> partial;
  clear(partial);
  add_summands<kWeighted, kPartial>(partial, next, domain.summands, start);
  add_rounded(sums, partial);
}

template <bool kWeighted, bool kPartial, bool kDomains, Stores kStores>
EPD_AVX2 void sum_columns(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
  constexpr std::size_t kVectors = kPartial || kDomains ? 2 : 4;  // of 16 bf16
  const std::size_t whole = hidden / (kVectors * 16) * (kVectors * 16);
  for (std::size_t start = 0; start < whole; start += kVectors * 16) {
    Columns<kVectors> sums;
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
      const __m256i low = _mm256_srli_epi32(round_upper(sums.even[v]), 16);
      put<kStores>(out + start + v * 16, _mm256_blend_epi16(low, round_upper(sums.odd[v]), 0xaa));
    }
  }
  sum_rest(sum, whole, hidden, out);
}

template <Stores kStores>
void sum_any(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
  const bool partial = !sum.partial_sums.empty();
  if (!sum.domains.empty()) {
    if (partial && sum.weighted) return sum_columns<true, true, true, kStores>(sum, hidden, out);
    if (partial) return sum_columns<false, true, true, kStores>(sum, hidden, out);
    if (sum.weighted) return sum_columns<true, false, true, kStores>(sum, hidden, out);
    return sum_columns<false, false, true, kStores>(sum, hidden, out);
  }
  if (partial && sum.weighted) return sum_columns<true, true, false, kStores>(sum, hidden, out);
  if (partial) return sum_columns<false, true, false, kStores>(sum, hidden, out);
  if (sum.weighted) return sum_columns<true, false, false, kStores>(sum, hidden, out);
  return sum_columns<false, false, false, kStores>(sum, hidden, out);
}

void sum_rows(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores stores) {
  if (stores == Stores::kStreaming && is_line_aligned(out))
    return sum_any<Stores::kStreaming>(sum, hidden, out);
  return sum_any<Stores::kCached>(sum, hidden, out);
}

void store_fence() {
  _mm_sfence();
}

}  // namespace

const RowKernels kAvx2RowKernels = {"avx2", copy_row, cast_row, sum_rows, store_fence};

}  // namespace epd::kernels::host

#endif
