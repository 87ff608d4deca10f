#include "host/row_kernels.h"
#include "kernels/numbers.h"
#include "kernels/operations.h"

#include <algorithm>
#include <vector>

namespace epd::kernels {
namespace {

// What one destination is told about the token: the choices that live there, in its numbering.
template <typename Index>
void store_choices(const std::int32_t* chosen, std::uint32_t topk, std::uint32_t first_expert,
                   std::uint32_t experts_per_rank, Index* out) {
  for (std::uint32_t k = 0; k < topk; ++k) {
    const std::uint32_t local = static_cast<std::uint32_t>(chosen[k]) - first_expert;
    out[k] = local < experts_per_rank ? static_cast<Index>(local) : Index{-1};
  }
}

void store_metadata(const DispatchArgs& args, std::uint32_t token, const RouteEntry& entry) {
  const DispatchTarget& target = args.targets[entry.rank];
  const std::size_t row = std::size_t{target.base_row} + entry.position;
  const std::int32_t* chosen = args.plan->topk.data() + std::size_t{token} * args.topk;
  const std::uint32_t first_expert = entry.rank * args.experts_per_rank;
  if (args.index64) {
    store_choices(chosen, args.topk, first_expert, args.experts_per_rank,
                  static_cast<std::int64_t*>(target.recv_topk_idx) + row * args.topk);
  } else {
    store_choices(chosen, args.topk, first_expert, args.experts_per_rank,
                  static_cast<std::int32_t*>(target.recv_topk_idx) + row * args.topk);
  }
  const float* weights =
      args.topk_weights == nullptr ? nullptr : args.topk_weights + std::size_t{token} * args.topk;
  float* recv_weights = target.recv_topk_weights + row * args.topk;
  for (std::uint32_t k = 0; k < args.topk; ++k) {
    const bool here = static_cast<std::uint32_t>(chosen[k]) - first_expert < args.experts_per_rank;
    recv_weights[k] = here && weights != nullptr ? weights[k] : 0.0f;
  }
  target.recv_src[2 * row] = static_cast<std::int32_t>(args.source_rank);
  target.recv_src[2 * row + 1] = static_cast<std::int32_t>(token);
}

std::size_t row_bytes(const DispatchArgs& args) {
  return args.fp8 ? std::size_t{args.hidden} : 2 * std::size_t{args.hidden};
}

}  // namespace

host::Choice host::dispatch_choice(const DispatchArgs& args) {
  return {&best_row_kernels(), stores_for(args.plan->entries.size() * row_bytes(args))};
}

void host::dispatch_rows_with(Choice choice, const DispatchArgs& args, std::uint32_t begin,
                              std::uint32_t end) {
  const RoutingPlan& plan = *args.plan;
  const std::size_t blocks = args.hidden / kScaleBlock;
  std::vector<void*> destinations(args.targets.size());
  std::vector<float> scales(args.fp8 ? blocks : 0);
  for (std::uint32_t token = begin; token < end; ++token) {
    const std::span<const RouteEntry> entries(plan.entries.data() + plan.begin[token],
                                              plan.begin[token + 1] - plan.begin[token]);
    if (entries.empty()) continue;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const DispatchTarget& target = args.targets[entries[i].rank];
      const std::size_t row = std::size_t{target.base_row} + entries[i].position;
      destinations[i] = static_cast<char*>(target.recv_x) + row * row_bytes(args);
      store_metadata(args, token, entries[i]);
    }
    const std::span<void* const> places(destinations.data(), entries.size());
    const std::uint16_t* x = args.x + std::size_t{token} * args.hidden;
    if (!args.fp8) {
      choice.kernels->copy_row(x, row_bytes(args), places, choice.stores);
      continue;
    }
    choice.kernels->cast_row(x, args.hidden, places, scales.data(), choice.stores);
    for (const RouteEntry& entry : entries) {
      const DispatchTarget& target = args.targets[entry.rank];
      const std::size_t row = std::size_t{target.base_row} + entry.position;
      std::copy(scales.begin(), scales.end(), target.recv_scales + row * blocks);
    }
  }
  choice.kernels->store_fence();
}

void dispatch_rows(const DispatchArgs& args, std::uint32_t begin, std::uint32_t end) {
  host::dispatch_rows_with(host::dispatch_choice(args), args, begin, end);
}

}  // namespace epd::kernels
