#include "kit/ceiling.h"

#include "kit/statistics.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace epd::kit {
namespace {

constexpr std::uint32_t kScaleBlock = 128;

#if defined(__SSE2__)
// Falls back to memcpy for rows that aren't whole, aligned vectors.
void streaming_copy(char* to, const char* from, std::size_t bytes) {
  constexpr std::size_t kVector = sizeof(__m128i);
  if (bytes % kVector != 0 || reinterpret_cast<std::uintptr_t>(to) % kVector != 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (std::size_t i = 0; i < bytes; i += kVector) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), value);
  }
}
void finish_streaming() {
  _mm_sfence();
}
#else
void streaming_copy(char* to, const char* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
void finish_streaming() {}
#endif

void copy_row(char* to, const char* from, std::size_t bytes, CopyKind kind) {
  if (kind == CopyKind::kStreaming) {
    streaming_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Every second row of [measurements, ranks], from `first` on.
std::vector<double> every_second(std::span<const double> values, std::size_t ranks, std::size_t first) {
  std::vector<double> chosen;
  for (std::size_t row = first; row < values.size() / ranks; row += 2) {
    const auto line = values.subspan(row * ranks, ranks);
    chosen.insert(chosen.end(), line.begin(), line.end());
  }
  return chosen;
}

}  // namespace

CopyKind copy_kind(std::size_t i) {
  return i % 2 == 0 ? CopyKind::kMemcpy : CopyKind::kStreaming;
}

double ceiling_time_us(std::span<const double> begins, std::span<const double> ends, std::size_t ranks) {
  double best = 0;
  for (const std::size_t first : {0u, 1u}) {
    const auto times =
        first_to_last(every_second(begins, ranks, first), every_second(ends, ranks, first), ranks);
    if (times.empty()) continue;
    const double p50 = quantile(times, 0.5);
    best = first == 0 ? p50 : std::min(best, p50);
  }
  return best;
}

std::uint64_t dispatch_row_bytes(std::uint32_t hidden, bool fp8) {
  return fp8 ? hidden + sizeof(float) * (hidden / kScaleBlock) : std::uint64_t{2} * hidden;
}

std::uint64_t combine_row_bytes(std::uint32_t hidden) {
  return std::uint64_t{2} * hidden;
}

CopyCeiling::CopyCeiling(const CeilingShape& shape) : shape_(shape) {
  const std::size_t bytes = std::size_t{shape.max_tokens} * shape.hidden * 2;
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    tokens_.emplace_back(bytes);
    rows_.emplace_back(bytes * shape.num_ranks);
  }
}

void CopyCeiling::warm(std::uint32_t rank) {
  std::memset(tokens_[rank].data(), 1, tokens_[rank].size());
  for (const SharedArray<char>& rows : rows_) {
    volatile char* page = rows.data();
    // Write back what is there: other ranks warm the same pages meanwhile.
    for (std::size_t i = 0; i < rows.size(); i += 4096) page[i] = page[i];
  }
}

std::uint64_t CopyCeiling::copy_dispatch(std::uint32_t rank, const kernels::RoutingPlan& plan,
                                         const std::vector<std::uint32_t>& bases, CopyKind kind) {
  const std::size_t row_bytes = dispatch_row_bytes(shape_.hidden, shape_.fp8);
  for (std::uint32_t t = 0; t < plan.num_tokens(); ++t) {
    const char* from = tokens_[rank].data() + t * row_bytes;
    for (std::uint32_t i = plan.begin[t]; i < plan.begin[t + 1]; ++i) {
      const kernels::RouteEntry& entry = plan.entries[i];
      const std::size_t row = std::size_t{bases[entry.rank]} + entry.position;
      copy_row(rows_[entry.rank].data() + row * row_bytes, from, row_bytes, kind);
    }
  }
  finish_streaming();
  return plan.entries.size() * row_bytes;
}

std::uint64_t CopyCeiling::copy_combine(std::uint32_t rank, const kernels::RoutingPlan& plan,
                                        const std::vector<std::uint32_t>& bases, CopyKind kind) {
  const std::size_t row_bytes = combine_row_bytes(shape_.hidden);
  for (std::uint32_t t = 0; t < plan.num_tokens(); ++t) {
    char* to = tokens_[rank].data() + t * row_bytes;
    for (std::uint32_t i = plan.begin[t]; i < plan.begin[t + 1]; ++i) {
      const kernels::RouteEntry& entry = plan.entries[i];
      const std::size_t row = std::size_t{bases[entry.rank]} + entry.position;
      copy_row(to, rows_[entry.rank].data() + row * row_bytes, row_bytes, kind);
    }
  }
  finish_streaming();
  return plan.entries.size() * row_bytes;
}

std::vector<std::uint32_t> base_rows(const std::uint32_t* counts, std::uint32_t num_ranks,
                                     std::uint32_t source) {
  std::vector<std::uint32_t> bases(num_ranks, 0);
  for (std::uint32_t lower = 0; lower < source; ++lower) {
    for (std::uint32_t d = 0; d < num_ranks; ++d) bases[d] += counts[lower * num_ranks + d];
  }
  return bases;
}

std::uint32_t received_rows(const std::uint32_t* counts, std::uint32_t num_ranks, std::uint32_t rank) {
  std::uint32_t rows = 0;
  for (std::uint32_t source = 0; source < num_ranks; ++source) rows += counts[source * num_ranks + rank];
  return rows;
}

}  // namespace epd::kit
