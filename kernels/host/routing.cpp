#include "kernels/routing.h"

#include <algorithm>
#include <bit>

namespace epd::kernels {
namespace {

// Division by the experts of a rank without a divide. Exact for any 32-bit dividend and a divisor below 2^31:
// the error of the reciprocal, at most dividend / 2^63, stays below 1 / divisor.
class RankOfExpert {
 public:
  explicit RankOfExpert(std::uint32_t experts_per_rank)
      : reciprocal_((std::uint64_t{1} << 63) / experts_per_rank + 1) {}

  std::uint32_t operator()(std::uint32_t expert) const {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((Wide{reciprocal_} * expert) >> 63);
  }

 private:
  std::uint64_t reciprocal_;
};

// The ranks of one token, without repetition, ascending. Up to 64 ranks: one bit each.
class RankMask {
 public:
  void clear() { mask_ = 0; }
  void add(std::uint32_t rank) { mask_ |= std::uint64_t{1} << rank; }
  template <typename Visit>
  void visit_ascending(Visit visit) {
    for (; mask_ != 0; mask_ &= mask_ - 1) visit(static_cast<std::uint32_t>(std::countr_zero(mask_)));
  }

 private:
  std::uint64_t mask_ = 0;
};

// The same for any number of ranks.
class RankList {
 public:
  explicit RankList(std::uint32_t topk) { ranks_.reserve(topk); }
  void clear() { ranks_.clear(); }
  void add(std::uint32_t rank) { ranks_.push_back(rank); }
  template <typename Visit>
  void visit_ascending(Visit visit) {
    std::sort(ranks_.begin(), ranks_.end());
    const auto last = std::unique(ranks_.begin(), ranks_.end());
    std::for_each(ranks_.begin(), last, visit);
  }

 private:
  std::vector<std::uint32_t> ranks_;
};

template <typename Index, typename RankSet>
RoutingError fill(const RoutingInput& input, RankSet ranks, RoutingPlan& plan) {
  // volatile: the value that was checked is the value that is used.
  const auto* choices = static_cast<const volatile Index*>(input.topk_idx);
  const RankOfExpert rank_of_expert(input.num_experts / input.num_ranks);
  const std::uint8_t* masked = input.masked.empty() ? nullptr : input.masked.data();
  std::int32_t* topk = plan.topk.data();
  RouteEntry* entry = plan.entries.data();
  for (std::uint32_t token = 0; token < input.num_tokens; ++token) {
    plan.begin[token] = static_cast<std::uint32_t>(entry - plan.entries.data());
    ranks.clear();
    for (std::uint32_t k = 0; k < input.topk; ++k) {
      const std::int64_t value = *choices++;
      if (value < -1 || value >= std::int64_t{input.num_experts}) return {true, token, k, value};
      *topk++ = static_cast<std::int32_t>(value);
      if (value == -1) continue;
      const auto expert = static_cast<std::uint32_t>(value);
      const std::uint32_t rank = rank_of_expert(expert);
      if (masked != nullptr && masked[rank] != 0) {
        topk[-1] = -1;
        ++plan.num_dropped;
        continue;
      }
      ++plan.expert_counts[expert];
      ranks.add(rank);
    }
    ranks.visit_ascending([&](std::uint32_t rank) { *entry++ = {rank, plan.rank_counts[rank]++}; });
  }
  plan.begin[input.num_tokens] = static_cast<std::uint32_t>(entry - plan.entries.data());
  plan.entries.resize(plan.begin[input.num_tokens]);
  return {};
}

template <typename Index>
RoutingError fill_any(const RoutingInput& input, RoutingPlan& plan) {
  if (input.num_ranks <= 64) return fill<Index>(input, RankMask{}, plan);
  return fill<Index>(input, RankList{input.topk}, plan);
}

}  // namespace

RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan) {
  const std::size_t tokens = input.num_tokens;
  plan.begin.resize(tokens + 1);
  plan.entries.resize(tokens * std::min(input.topk, input.num_ranks));
  plan.topk.resize(tokens * input.topk);
  plan.rank_counts.assign(input.num_ranks, 0);
  plan.expert_counts.assign(input.num_experts, 0);
  plan.num_dropped = 0;
  const RoutingError error =
      input.index64 ? fill_any<std::int64_t>(input, plan) : fill_any<std::int32_t>(input, plan);
  // A refused plan routes nothing.
  if (error.bad) {
    plan.begin.assign(1, 0);
    plan.entries.clear();
    plan.topk.clear();
    plan.num_dropped = 0;
    plan.rank_counts.assign(input.num_ranks, 0);
    plan.expert_counts.assign(input.num_experts, 0);
  }
  return error;
}

void drop_ranks(std::span<const std::uint8_t> gone, std::uint32_t num_experts, RoutingPlan& plan) {
  const std::uint32_t experts_per_rank = num_experts / static_cast<std::uint32_t>(gone.size());
  for (std::int32_t& choice : plan.topk) {
    if (choice < 0 || gone[static_cast<std::uint32_t>(choice) / experts_per_rank] == 0) continue;
    choice = -1;
    ++plan.num_dropped;
  }
  std::uint32_t kept = 0;
  std::uint32_t next = 0;
  for (std::uint32_t token = 0; token < plan.num_tokens(); ++token) {
    plan.begin[token] = kept;
    for (; next < plan.begin[token + 1]; ++next) {
      if (gone[plan.entries[next].rank] == 0) plan.entries[kept++] = plan.entries[next];
    }
  }
  plan.begin.back() = kept;
  plan.entries.resize(kept);
  for (std::size_t rank = 0; rank < gone.size(); ++rank) {
    if (gone[rank] == 0) continue;
    plan.rank_counts[rank] = 0;
    std::fill_n(plan.expert_counts.begin() + static_cast<std::ptrdiff_t>(rank * experts_per_rank),
                experts_per_rank, 0);
  }
}

}  // namespace epd::kernels
