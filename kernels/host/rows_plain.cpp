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
void cast_finite_block(std::span<const std::uint16_t> x, float inverse, std::uint8_t* q) {
  for (std::size_t i = 0; i < x.size(); ++i) {
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
float cast_block(std::span<const std::uint16_t> x, bool pow2, std::uint8_t* q) {
  std::int16_t largest = 0;  // bf16 magnitudes order as their bits do
  for (const std::uint16_t bits : x) largest = std::max(largest, static_cast<std::int16_t>(bits & 0x7fff));
  if (largest >= 0x7f80) return cast_special_block(x, pow2, q);
  const float amax = std::max(bf16_to_float(static_cast<std::uint16_t>(largest)), kMinAmax);
  const BlockScale scale = block_scale(amax, pow2);
  cast_finite_block(x, scale.inverse, q);
  return scale.scale;
}

// Casts the block that begins at `start`.
void cast_block_of(const CastRow& row, std::size_t start, std::span<void* const> destinations) {
  const std::size_t width = std::min<std::size_t>(kScaleBlock, row.hidden - start);
  std::uint8_t q[kScaleBlock];
  row.scales[start / kScaleBlock] = cast_block({row.x + start, width}, row.pow2, q);
  for (void* destination : destinations)
    std::memcpy(static_cast<std::uint8_t*>(destination) + start, q, width);
}

void cast_row(const CastRow& row, std::span<void* const> destinations, Stores /*stores*/) {
  for (std::size_t start = 0; start < row.hidden; start += kScaleBlock)
    cast_block_of(row, start, destinations);
}

// Sums of up to kColumns columns, from `start` on.
struct Columns {
  std::size_t start;
  std::size_t width;
  std::array<float, kColumns> sums{};
};

float fused(float weight, float value, float sum) {
#if defined(FP_FAST_FMAF)
  return std::fma(weight, value, sum);
#else
  return fma_by_double(weight, value, sum);
#endif
}

void add_row(const WeightedRow& source, bool weighted, Columns& to) {
  const std::uint16_t* row = source.row + to.start;
  auto& sums = to.sums;
  if (weighted) {
    for (std::size_t i = 0; i < to.width; ++i) {
      sums[i] = fused(source.weight, bf16_to_float(row[i]), sums[i]);
    }
  } else {
    for (std::size_t i = 0; i < to.width; ++i) sums[i] += bf16_to_float(row[i]);
  }
}

void add_rounded(const Columns& partial, Columns& to) {
  for (std::size_t i = 0; i < to.width; ++i) to.sums[i] += bf16_to_float(float_to_bf16(partial.sums[i]));
}

// So many summands, from `next` on.
void add_summands(const RowSum& sum, std::size_t count, Summands& next, Columns& sums) {
  for (std::size_t i = 0; i < count; ++i) {
    if (sum.partial_sums.empty()) {
      add_row(*next.row++, sum.weighted, sums);
      continue;
    }
    Columns partial{sums.start, sums.width};
    for (std::uint32_t j = 0; j < *next.partial_sum; ++j) add_row(*next.row++, sum.weighted, partial);
    ++next.partial_sum;
    add_rounded(partial, sums);
  }
}

void sum_columns(const RowSum& sum, Columns sums, std::uint16_t* out) {
  const std::size_t all = sum.partial_sums.empty() ? sum.rows.size() : sum.partial_sums.size();
  Summands next{sum.rows.data(), sum.partial_sums.data()};
  if (sum.domains.empty()) add_summands(sum, all, next, sums);
  for (const SumDomain& domain : sum.domains) {
    if (domain.rounded) {
      Columns partial{sums.start, sums.width};
      add_summands(sum, domain.summands, next, partial);
      add_rounded(partial, sums);
    } else {
      add_summands(sum, domain.summands, next, sums);
    }
  }
  for (std::size_t i = 0; i < sums.width; ++i) out[sums.start + i] = float_to_bf16(sums.sums[i]);
}

void sum_rows(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores /*stores*/) {
  for (std::size_t start = 0; start < hidden; start += kColumns)
    sum_columns(sum, {start, std::min(kColumns, hidden - start)}, out);
}

void store_fence() {}  // ordinary stores only

}  // namespace

void cast_rest(const CastRow& row, std::size_t start, std::span<void* const> destinations) {
  if (start < row.hidden) cast_block_of(row, start, destinations);
}

void sum_rest(const RowSum& sum, std::size_t start, std::size_t hidden, std::uint16_t* out) {
  if (start < hidden) sum_columns(sum, {start, hidden - start}, out);
}

const RowKernels kPlainRowKernels = {"plain", copy_row, cast_row, sum_rows, store_fence};

}  // namespace epd::kernels::host
