// The path for any architecture: plain loops, which the compiler vectorises as far as the target allows.
#include "host/fma.h"
#include "host/row_kernels.h"
#include "kernels/numbers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace epd::kernels::host {
namespace {

constexpr std::size_t kColumns = 128;  // accumulators that stay in the nearest cache

void copy_row(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores /*stores*/) {
  for (void* destination : destinations) std::memcpy(destination, source, bytes);
}

// Casts a block of finite values; float_to_e4m3 explains the rounding. |x * inverse| rounds to at most 448
// here.
void cast_finite_block(const std::uint16_t* x, float inverse, std::uint8_t* q) {
  for (std::uint32_t i = 0; i < kScaleBlock; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(bf16_to_float(x[i]) * inverse);
    const std::int32_t magnitude = bits & 0x7fffffff;
    const std::int32_t exponent = std::max(magnitude & 0x7f800000, 121 << 23);
    const std::int32_t shifter = exponent + (20 << 23);
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(shifter);
    const std::int32_t steps = std::bit_cast<std::int32_t>(sum) - shifter;
    const std::int32_t code = steps + ((exponent - (121 << 23)) >> 20);
    q[i] = static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80));
  }
}

// Casts a block and returns the scale.
float cast_block(const std::uint16_t* x, bool pow2, std::uint8_t* q) {
  std::int16_t largest = 0;  // bf16 magnitudes order as their bits do
  for (std::uint32_t i = 0; i < kScaleBlock; ++i) {
    largest = std::max(largest, static_cast<std::int16_t>(x[i] & 0x7fff));
  }
  if (largest >= 0x7f80) return cast_special_block(x, pow2, q);
  const float amax = std::max(bf16_to_float(static_cast<std::uint16_t>(largest)), kMinAmax);
  const BlockScale scale = block_scale(amax, pow2);
  cast_finite_block(x, scale.inverse, q);
  return scale.scale;
}

void cast_row(const CastRow& row, std::span<void* const> destinations, Stores /*stores*/) {
  float* scales = row.scales;
  for (std::size_t start = 0; start < row.hidden; start += kScaleBlock) {
    std::uint8_t q[kScaleBlock];
    *scales++ = cast_block(row.x + start, row.pow2, q);
    for (void* destination : destinations) {
      std::memcpy(static_cast<std::uint8_t*>(destination) + start, q, kScaleBlock);
    }
  }
}

using Columns = std::array<float, kColumns>;

float fused(float weight, float value, float sum) {
#if defined(FP_FAST_FMAF)
  return std::fma(weight, value, sum);
#else
  return fma_by_double(weight, value, sum);
#endif
}

void add_row(const WeightedRow& source, std::size_t start, bool weighted, Columns& sums) {
  const std::uint16_t* row = source.row + start;
  if (weighted) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      sums[i] = fused(source.weight, bf16_to_float(row[i]), sums[i]);
    }
  } else {
    for (std::size_t i = 0; i < kColumns; ++i) sums[i] += bf16_to_float(row[i]);
  }
}

void add_rounded(const Columns& partial, Columns& sums) {
  for (std::size_t i = 0; i < kColumns; ++i) sums[i] += bf16_to_float(float_to_bf16(partial[i]));
}

// So many summands, from `next` on.
void add_summands(const RowSum& sum, std::size_t count, std::size_t start, Summands& next, Columns& sums) {
  for (std::size_t i = 0; i < count; ++i) {
    if (sum.partial_sums.empty()) {
      add_row(*next.row++, start, sum.weighted, sums);
      continue;
    }
    Columns partial{};
    for (std::uint32_t j = 0; j < *next.partial_sum; ++j) add_row(*next.row++, start, sum.weighted, partial);
    ++next.partial_sum;
    add_rounded(partial, sums);
  }
}

void sum_rows(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores /*stores*/) {
  const std::size_t all = sum.partial_sums.empty() ? sum.rows.size() : sum.partial_sums.size();
  for (std::size_t start = 0; start < hidden; start += kColumns) {
    Columns sums{};
    Summands next{sum.rows.data(), sum.partial_sums.data()};
    if (sum.domains.empty()) add_summands(sum, all, start, next, sums);
    for (const SumDomain& domain : sum.domains) {
      if (domain.rounded) {
        Columns partial{};
        add_summands(sum, domain.summands, start, next, partial);
        add_rounded(partial, sums);
      } else {
        add_summands(sum, domain.summands, start, next, sums);
      }
    }
    for (std::size_t i = 0; i < kColumns; ++i) out[start + i] = float_to_bf16(sums[i]);
  }
}

void store_fence() {}  // ordinary stores only

}  // namespace

const RowKernels kPlainRowKernels = {"plain", copy_row, cast_row, sum_rows, store_fence};

}  // namespace epd::kernels::host
