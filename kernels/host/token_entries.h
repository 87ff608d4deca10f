// A token's rows as combine looks at them: its entries in the plan, their weights, and which of its choices
// each row carries. Internal.
#pragma once

#include "host/rank_of_expert.h"
#include "host/weights.h"
#include "kernels/routing.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::host {

class TokenEntries {
 public:
  // `topk_weights`: null: unweighted.
  TokenEntries(const RoutingPlan& plan, std::uint32_t topk, std::uint32_t experts_per_rank,
               const float* topk_weights)
      : plan_(plan),
        topk_(topk),
        experts_per_rank_(experts_per_rank),
        topk_weights_(topk_weights),
        rank_of_expert_(experts_per_rank) {}

  std::span<const RouteEntry> of(std::uint32_t token) const {
    return std::span(plan_.entries).subspan(plan_.begin[token], plan_.begin[token + 1] - plan_.begin[token]);
  }
  std::uint32_t rank_of(const RouteEntry& entry) const {
    return plan_.per_expert ? rank_of_expert_(entry.target) : entry.target;
  }

  // The weight of the row in the sum: of the rank, or of the expert. 1 without weights.
  float weight(std::uint32_t token, const RouteEntry& entry) const {
    if (topk_weights_ == nullptr) return 1.0f;
    const float* weights = topk_weights_ + std::size_t{token} * topk_;
    if (plan_.per_expert) return weight_of_expert(chosen(token), weights, topk_, entry.target);
    return weight_of_rank(chosen(token), weights, topk_, entry.target * experts_per_rank_, experts_per_rank_);
  }

  // Visits the k of the choices that the entry's row carries.
  template <typename Visit>
  void visit_choices(std::uint32_t token, const RouteEntry& entry, Visit visit) const {
    const std::int32_t* choices = chosen(token);
    for (std::uint32_t k = 0; k < topk_; ++k) {
      const auto expert = static_cast<std::uint32_t>(choices[k]);
      const bool carried = plan_.per_expert ? expert == entry.target
                                            : expert - entry.target * experts_per_rank_ < experts_per_rank_;
      if (carried) visit(k);
    }
  }

 private:
  const std::int32_t* chosen(std::uint32_t token) const {
    return plan_.topk.data() + std::size_t{token} * topk_;
  }

  const RoutingPlan& plan_;
  const std::uint32_t topk_;
  const std::uint32_t experts_per_rank_;
  const float* const topk_weights_;
  const RankOfExpert rank_of_expert_;
};

}  // namespace epd::kernels::host
