#include "host/row_kernels.h"
#include "host/store_policy.h"
#include "host/token_entries.h"
#include "host/token_sum.h"
#include "host/weight_sum.h"
#include "kernels/rows.h"

#include <algorithm>
#include <iterator>

namespace epd::kernels {
namespace {

class Combiner {
 public:
  Combiner(host::Choice choice, const CombineArgs& args)
      : choice_(choice),
        args_(args),
        per_expert_(args.plan->per_expert),
        entries_(*args.plan, args.topk, args.experts_per_rank, args.topk_weights),
        sum_(per_expert_, args.rank, args.sum_ranks, args.sources.size(), args.topk + std::size(args.bias)),
        weights_(args.topk, args.rank, args.sum_ranks, args.sources.size()) {}

  void combine(std::uint32_t token) {
    find_rows(token);
    choice_.kernels->sum_rows(sum_.sum(args_.topk_weights != nullptr), args_.hidden,
                              args_.out + std::size_t{token} * args_.hidden, choice_.stores);
    if (args_.out_weights == nullptr) return;
    if (args_.sum_weights && !per_expert_) {
      sum_weights(token);
    } else {
      return_weights(token);
    }
  }

 private:
  std::size_t row_of(const RouteEntry& entry) const {
    return static_cast<std::uint32_t>(args_.base[entry.target]) + entry.position;
  }

  void find_rows(std::uint32_t token) {
    sum_.begin();
    for (const std::uint16_t* bias : args_.bias) {
      if (bias != nullptr) sum_.add_bias(bias + std::size_t{token} * args_.hidden);
    }
    for (const RouteEntry& entry : entries_.of(token)) {
      const std::uint32_t rank = entries_.rank_of(entry);
      const std::uint16_t* y = args_.sources[rank].y;
      if (y == nullptr) continue;
      sum_.add_row(rank, y + row_of(entry) * args_.hidden, entries_.weight(token, entry));
    }
  }

  void sum_weights(std::uint32_t token) {
    weights_.begin();
    for (const RouteEntry& entry : entries_.of(token)) {
      const float* y_weights = args_.sources[entry.target].y_weights;
      if (y_weights != nullptr) weights_.add(entry.target, y_weights + row_of(entry) * args_.topk);
    }
    weights_.store(args_.out_weights + std::size_t{token} * args_.topk);
  }

  void return_weights(std::uint32_t token) const {
    float* out = args_.out_weights + std::size_t{token} * args_.topk;
    std::fill_n(out, args_.topk, 0.0f);
    for (const RouteEntry& entry : entries_.of(token)) {
      const float* y_weights = args_.sources[entries_.rank_of(entry)].y_weights;
      if (y_weights == nullptr) continue;
      const std::size_t row = row_of(entry);
      entries_.visit_choices(token, entry, [&](std::uint32_t k) {
        out[k] = per_expert_ ? y_weights[row] : y_weights[row * args_.topk + k];
      });
    }
  }

  host::Choice choice_;
  const CombineArgs& args_;
  bool per_expert_;
  host::TokenEntries entries_;
  host::TokenSum sum_;  // of the current token
  host::WeightSum weights_;
};

}  // namespace

void host::combine_rows_with(Choice choice, const CombineArgs& args, std::uint32_t begin, std::uint32_t end) {
  Combiner combiner(choice, args);
  for (std::uint32_t token = begin; token < end; ++token) combiner.combine(token);
  choice.kernels->store_fence();
}

void combine_rows(const CombineArgs& args, std::uint32_t begin, std::uint32_t end) {
  // The volume of all pulled rows shows how much else wants the caches.
  const std::size_t volume = args.plan->entries.size() * args.hidden * sizeof(std::uint16_t);
  const host::Stores stores = host::StorePolicy::of_process().preferred(volume);
  host::combine_rows_with({&host::best_row_kernels(), stores}, args, begin, end);
}

}  // namespace epd::kernels
