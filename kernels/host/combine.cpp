#include "host/row_kernels.h"
#include "kernels/operations.h"

#include <vector>

namespace epd::kernels {
namespace {

// W of the token on one rank.
float rank_weight(const CombineArgs& args, std::uint32_t token, std::uint32_t rank) {
  const std::size_t first = std::size_t{token} * args.topk;
  const std::uint32_t first_expert = rank * args.experts_per_rank;
  float weight = 0.0f;
  for (std::size_t i = first; i < first + args.topk; ++i) {
    const std::uint32_t local = static_cast<std::uint32_t>(args.plan->topk[i]) - first_expert;
    if (local < args.experts_per_rank) weight += args.topk_weights[i];
  }
  return weight;
}

void find_rows(const CombineArgs& args, std::uint32_t token, std::vector<host::WeightedRow>& rows) {
  rows.clear();
  for (std::uint32_t i = args.plan->begin[token]; i < args.plan->begin[token + 1]; ++i) {
    const RouteEntry& entry = args.plan->entries[i];
    const CombineSource& source = args.sources[entry.rank];
    const std::size_t row = std::size_t{source.base_row} + entry.position;
    const float weight = args.topk_weights == nullptr ? 1.0f : rank_weight(args, token, entry.rank);
    rows.push_back({source.y + row * args.hidden, weight});
  }
}

}  // namespace

host::Choice host::combine_choice(const CombineArgs& args) {
  const std::size_t volume = args.plan->entries.size() * args.hidden * sizeof(std::uint16_t);
  return {&best_row_kernels(), stores_for(volume)};
}

void host::combine_rows_with(Choice choice, const CombineArgs& args, std::uint32_t begin, std::uint32_t end) {
  const auto sum =
      args.topk_weights == nullptr ? choice.kernels->sum_rows : choice.kernels->weighted_sum_rows;
  std::vector<WeightedRow> rows;
  rows.reserve(args.topk);
  for (std::uint32_t token = begin; token < end; ++token) {
    find_rows(args, token, rows);
    sum(rows, args.hidden, args.out + std::size_t{token} * args.hidden, choice.stores);
  }
  choice.kernels->store_fence();
}

void combine_rows(const CombineArgs& args, std::uint32_t begin, std::uint32_t end) {
  host::combine_rows_with(host::combine_choice(args), args, begin, end);
}

}  // namespace epd::kernels
