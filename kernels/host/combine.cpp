#include "host/rank_of_expert.h"
#include "host/row_kernels.h"
#include "host/store_policy.h"
#include "host/weights.h"
#include "kernels/operations.h"

#include <algorithm>
#include <vector>

namespace epd::kernels {
namespace {

class Combiner {
 public:
  Combiner(host::Choice choice, const CombineArgs& args)
      : choice_(choice),
        args_(args),
        rank_of_expert_(args.experts_per_rank),
        per_expert_(args.plan->per_expert),
        by_domains_(args.sum_ranks != 0 && args.sum_ranks < args.sources.size()) {
    rows_.reserve(args.topk + std::size(args.bias));
    partial_sums_.reserve(args.topk + std::size(args.bias));
    if (by_domains_) domains_.reserve(args.topk + 1);
  }

  void combine(std::uint32_t token) {
    find_rows(token);
    const host::RowSum sum{rows_, partial_sums_, domains_, args_.topk_weights != nullptr};
    choice_.kernels->sum_rows(sum, args_.hidden, args_.out + std::size_t{token} * args_.hidden,
                              choice_.stores);
    if (args_.out_weights != nullptr) return_weights(token);
  }

 private:
  std::uint32_t rank_of(const RouteEntry& entry) const {
    return per_expert_ ? rank_of_expert_(entry.target) : entry.target;
  }
  std::size_t row_of(const RouteEntry& entry) const {
    return static_cast<std::uint32_t>(args_.base[entry.target]) + entry.position;
  }
  std::span<const RouteEntry> entries(std::uint32_t token) const {
    const RoutingPlan& plan = *args_.plan;
    return std::span(plan.entries).subspan(plan.begin[token], plan.begin[token + 1] - plan.begin[token]);
  }
  const std::int32_t* chosen(std::uint32_t token) const {
    return args_.plan->topk.data() + std::size_t{token} * args_.topk;
  }

  float weight(std::uint32_t token, const RouteEntry& entry) const {
    if (args_.topk_weights == nullptr) return 1.0f;
    const float* weights = args_.topk_weights + std::size_t{token} * args_.topk;
    if (per_expert_) return host::weight_of_expert(chosen(token), weights, args_.topk, entry.target);
    return host::weight_of_rank(chosen(token), weights, args_.topk, entry.target * args_.experts_per_rank,
                                args_.experts_per_rank);
  }

  // Of the biases, then of each domain that has rows of the token.
  void begin_domain(bool rounded) { domains_.push_back({0, rounded}); }

  // A row of the rank, or of a per-expert plan its partial sum. Ranks ascend.
  void begin_summand(std::uint32_t rank) {
    if (per_expert_) partial_sums_.push_back(0);
    if (!by_domains_) return;
    if (rank >= domain_end_) {
      const std::uint32_t domain = rank / args_.sum_ranks;
      begin_domain(domain != args_.rank / args_.sum_ranks);
      domain_end_ = (domain + 1) * args_.sum_ranks;
    }
    ++domains_.back().summands;
  }

  void find_rows(std::uint32_t token) {
    rows_.clear();
    partial_sums_.clear();
    domains_.clear();
    domain_end_ = 0;
    if (by_domains_) begin_domain(false);
    // A bias is a row like others, of a partial sum of its own: multiplied by 1 and rounded to bf16 it stays
    // what it is.
    for (const std::uint16_t* bias : args_.bias) {
      if (bias == nullptr) continue;
      rows_.push_back({bias + std::size_t{token} * args_.hidden, 1.0f});
      if (per_expert_) partial_sums_.push_back(1);
      if (by_domains_) ++domains_.back().summands;
    }
    std::uint32_t last_rank = static_cast<std::uint32_t>(args_.sources.size());
    for (const RouteEntry& entry : entries(token)) {
      const std::uint32_t rank = rank_of(entry);
      const std::uint16_t* y = args_.sources[rank].y;
      if (y == nullptr) continue;
      rows_.push_back({y + row_of(entry) * args_.hidden, weight(token, entry)});
      if (!per_expert_ || rank != last_rank) begin_summand(rank);
      if (per_expert_) ++partial_sums_.back();
      last_rank = rank;
    }
  }

  void return_weights(std::uint32_t token) const {
    const std::size_t first = std::size_t{token} * args_.topk;
    std::fill_n(args_.out_weights + first, args_.topk, 0.0f);
    for (const RouteEntry& entry : entries(token)) {
      const CombineSource& source = args_.sources[rank_of(entry)];
      if (source.y_weights == nullptr) continue;
      return_weights_of(entry, source.y_weights, chosen(token), args_.out_weights + first);
    }
  }

  // Returns the weights of the choices that the entry's row carries.
  void return_weights_of(const RouteEntry& entry, const float* y_weights, const std::int32_t* choices,
                         float* out) const {
    const std::size_t row = row_of(entry);
    for (std::uint32_t k = 0; k < args_.topk; ++k) {
      const auto expert = static_cast<std::uint32_t>(choices[k]);
      if (per_expert_) {
        if (expert == entry.target) out[k] = y_weights[row];
      } else if (expert - entry.target * args_.experts_per_rank < args_.experts_per_rank) {
        out[k] = y_weights[row * args_.topk + k];
      }
    }
  }

  host::Choice choice_;
  const CombineArgs& args_;
  host::RankOfExpert rank_of_expert_;
  bool per_expert_;
  std::vector<host::WeightedRow> rows_;      // of the current token
  std::vector<std::uint32_t> partial_sums_;  // per-expert plans: rows of each rank
  bool by_domains_;                          // there are several, and not every token has rows of one only
  std::vector<host::SumDomain> domains_;
  std::uint32_t domain_end_ = 0;  // the first rank behind the last of domains_
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
