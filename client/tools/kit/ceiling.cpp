#include "kit/ceiling.h"

#include "kit/error.h"
#include "kit/report.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace epd::kit {

using kernels::reference::GroupParams;
using kernels::reference::Layout;

namespace {

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

std::uint64_t dispatch_row_bytes(const GroupParams& params) {
  return kernels::reference::row_bytes(params) + kernels::reference::scale_bytes(params);
}

std::uint64_t combine_row_bytes(std::uint32_t hidden) {
  return std::uint64_t{2} * hidden;
}

std::uint32_t targets_per_rank(const GroupParams& params) {
  return params.layout == Layout::kCompact ? 1 : params.num_experts / params.num_ranks;
}

CopyCeiling::CopyCeiling(const GroupParams& params, std::uint32_t max_tokens)
    : dispatch_bytes_(dispatch_row_bytes(params)),
      combine_bytes_(combine_row_bytes(params.hidden)),
      targets_per_rank_(kit::targets_per_rank(params)) {
  const std::size_t row = std::max(dispatch_bytes_, combine_bytes_);
  const std::size_t tokens = std::size_t{max_tokens} * params.num_ranks;
  const std::size_t most = tokens * std::min(params.topk, targets_per_rank_);
  const std::size_t even = std::min(most, std::max(tokens, std::size_t{max_tokens} * params.topk * 9 / 8));
  warm_bytes_ = even * row;
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    tokens_.emplace_back(max_tokens * row);
    rows_.emplace_back(most * row);
  }
}

void CopyCeiling::warm(std::uint32_t rank) {
  if (tokens_[rank].size() != 0) std::memset(tokens_[rank].data(), 1, tokens_[rank].size());
  for (const SharedArray<char>& rows : rows_) {
    volatile char* page = rows.data();
    // Write back what is there: other ranks warm the same pages meanwhile.
    for (std::size_t i = 0; i < warm_bytes_; i += 4096) page[i] = page[i];
  }
}

char* CopyCeiling::row_at(const kernels::RouteEntry& entry, const std::vector<std::uint32_t>& bases,
                          std::size_t row_bytes) const {
  const std::size_t row = std::size_t{bases[entry.target]} + entry.position;
  return rows_[entry.target / targets_per_rank_].data() + row * row_bytes;
}

std::uint64_t CopyCeiling::copy_dispatch(std::uint32_t rank, const kernels::RoutingPlan& plan,
                                         const std::vector<std::uint32_t>& bases, CopyKind kind) {
  for (std::uint32_t t = 0; t < plan.num_tokens(); ++t) {
    const char* from = tokens_[rank].data() + t * dispatch_bytes_;
    for (std::uint32_t i = plan.begin[t]; i < plan.begin[t + 1]; ++i)
      copy_row(row_at(plan.entries[i], bases, dispatch_bytes_), from, dispatch_bytes_, kind);
  }
  finish_streaming();
  return plan.entries.size() * dispatch_bytes_;
}

std::uint64_t CopyCeiling::copy_combine(std::uint32_t rank, const kernels::RoutingPlan& plan,
                                        const std::vector<std::uint32_t>& bases, CopyKind kind) {
  for (std::uint32_t t = 0; t < plan.num_tokens(); ++t) {
    char* to = tokens_[rank].data() + t * combine_bytes_;
    for (std::uint32_t i = plan.begin[t]; i < plan.begin[t + 1]; ++i)
      copy_row(to, row_at(plan.entries[i], bases, combine_bytes_), combine_bytes_, kind);
  }
  finish_streaming();
  return plan.entries.size() * combine_bytes_;
}

std::vector<std::uint32_t> base_rows(const TargetCounts& counts, std::uint32_t source) {
  const std::uint32_t targets = counts.num_ranks * counts.targets_per_rank;
  std::vector<std::uint32_t> bases(targets, 0);
  std::uint32_t before = 0;  // rows of lower targets of the rank
  for (std::uint32_t target = 0; target < targets; ++target) {
    if (target % counts.targets_per_rank == 0) before = 0;
    for (std::uint32_t s = 0; s < counts.num_ranks; ++s) {
      if (s == source) bases[target] = before;
      before += counts.rows[s * targets + target];
    }
  }
  return bases;
}

std::vector<std::uint32_t> exchange_rows(const kernels::RoutingInput& input, TeamRank& self,
                                         std::uint32_t* counts, kernels::RoutingPlan& plan) {
  const kernels::RoutingError error = kernels::build_routing_plan(input, plan);
  if (error.bad) fail("expert " + std::to_string(error.value) + " was chosen, which is not there");
  const std::vector<std::uint32_t>& own = input.per_expert ? plan.expert_counts : plan.rank_counts;
  self.barrier();  // the previous counts are no longer read
  std::copy(own.begin(), own.end(), counts + self.rank() * own.size());
  self.barrier();
  return base_rows({counts, self.size(), static_cast<std::uint32_t>(own.size()) / self.size()}, self.rank());
}

std::uint32_t received_rows(const TargetCounts& counts, std::uint32_t rank) {
  std::uint32_t rows = 0;
  for (std::uint32_t source = 0; source < counts.num_ranks; ++source)
    rows += rows_between(counts, source, rank);
  return rows;
}

std::uint32_t rows_between(const TargetCounts& counts, std::uint32_t source, std::uint32_t rank) {
  const std::uint32_t n = counts.targets_per_rank;
  const std::uint32_t* first = counts.rows + (std::size_t{source} * counts.num_ranks + rank) * n;
  return std::accumulate(first, first + n, 0u);
}

}  // namespace epd::kit
