#include "kernels/routing.h"

#include "host/rank_of_expert.h"

#include <algorithm>
#include <array>
#include <bit>

namespace epd::kernels {
namespace {

// Which choices of one token live where. Up to 64 ranks: a bit for each, and the choices of each as bits.
class ChoicesByRank {
 public:
  void clear() {}  // visiting empties it
  void add(std::uint32_t rank, std::uint32_t k) {
    ranks_ |= std::uint64_t{1} << rank;
    choices_[rank] |= std::uint32_t{1} << k;
  }
  // Ranks ascending, each with the set of its choices.
  template <typename Visit>
  void visit_ascending(Visit visit) {
    for (; ranks_ != 0; ranks_ &= ranks_ - 1) {
      const auto rank = static_cast<std::uint32_t>(std::countr_zero(ranks_));
      visit(rank, choices_[rank]);
      choices_[rank] = 0;
    }
  }

 private:
  std::uint64_t ranks_ = 0;
  std::array<std::uint32_t, 64> choices_{};
};

// The same for any number of ranks.
class SortedChoices {
 public:
  explicit SortedChoices(std::uint32_t topk) { choices_.reserve(topk); }
  void clear() { choices_.clear(); }
  void add(std::uint32_t rank, std::uint32_t k) { choices_.push_back(rank * 32 + k); }
  template <typename Visit>
  void visit_ascending(Visit visit) {
    std::sort(choices_.begin(), choices_.end());
    for (std::size_t i = 0; i < choices_.size();) {
      const std::uint32_t rank = choices_[i] / 32;
      std::uint32_t ks = 0;
      for (; i < choices_.size() && choices_[i] / 32 == rank; ++i) ks |= std::uint32_t{1} << choices_[i] % 32;
      visit(rank, ks);
    }
  }

 private:
  std::vector<std::uint32_t> choices_;  // rank * 32 + k
};

// Appends entries; one instance per plan.
class EntryWriter {
 public:
  explicit EntryWriter(RoutingPlan& plan) : plan_(plan), next_(plan.entries.data()) {
    if (plan.per_expert) last_token_.assign(plan.expert_counts.size(), 0);
  }
  std::uint32_t written() const { return static_cast<std::uint32_t>(next_ - plan_.entries.data()); }

  // Whether the choice needs a row of its own.
  template <bool kPerExpert>
  bool wants_row(std::uint32_t token, std::uint32_t expert) {
    if constexpr (!kPerExpert) {
      ++plan_.expert_counts[expert];
      return true;
    }
    const bool first = last_token_[expert] != token + 1;
    last_token_[expert] = token + 1;
    return first;
  }

  // The token's rows to `rank`, for the choices in the set `ks`.
  template <bool kPerExpert>
  void write(std::uint32_t rank, std::uint32_t ks, const std::int32_t* chosen) {
    const std::uint32_t position = plan_.rank_counts[rank]++;
    if constexpr (!kPerExpert) {
      *next_++ = {rank, position};
      return;
    }
    for (; ks != 0; ks &= ks - 1) {
      const auto expert = static_cast<std::uint32_t>(chosen[std::countr_zero(ks)]);
      *next_++ = {expert, plan_.expert_counts[expert]++};
    }
  }

 private:
  RoutingPlan& plan_;
  RouteEntry* next_;
  std::vector<std::uint32_t> last_token_;  // [E], plus one: which token chose the expert last
};

template <typename Index, bool kPerExpert, typename Choices>
RoutingError fill(const RoutingInput& input, Choices choices, RoutingPlan& plan) {
  // volatile: the value that was checked is the value that is used.
  const auto* given = static_cast<const volatile Index*>(input.topk_idx);
  const host::RankOfExpert rank_of_expert(input.num_experts / input.num_ranks);
  EntryWriter writer(plan);
  std::int32_t* chosen = plan.topk.data();
  for (std::uint32_t token = 0; token < input.num_tokens; ++token, chosen += input.topk) {
    plan.begin[token] = writer.written();
    choices.clear();
    for (std::uint32_t k = 0; k < input.topk; ++k) {
      const std::int64_t value = *given++;
      if (value < -1 || value >= std::int64_t{input.num_experts}) return {true, token, k, value};
      chosen[k] = static_cast<std::int32_t>(value);
      if (value == -1) continue;
      const auto expert = static_cast<std::uint32_t>(value);
      const std::uint32_t rank = rank_of_expert(expert);
      if (!input.masked.empty() && input.masked[rank] != 0) [[unlikely]] {
        chosen[k] = -1;
        ++plan.num_dropped;
        continue;
      }
      if (writer.template wants_row<kPerExpert>(token, expert)) choices.add(rank, k);
    }
    choices.visit_ascending(
        [&](std::uint32_t rank, std::uint32_t ks) { writer.template write<kPerExpert>(rank, ks, chosen); });
  }
  plan.begin[input.num_tokens] = writer.written();
  plan.entries.resize(writer.written());
  return {};
}

template <typename Index, bool kPerExpert>
RoutingError fill_any(const RoutingInput& input, RoutingPlan& plan) {
  if (input.num_ranks <= 64) return fill<Index, kPerExpert>(input, ChoicesByRank{}, plan);
  return fill<Index, kPerExpert>(input, SortedChoices{input.topk}, plan);
}

template <typename Index>
RoutingError fill_layout(const RoutingInput& input, RoutingPlan& plan) {
  return input.per_expert ? fill_any<Index, true>(input, plan) : fill_any<Index, false>(input, plan);
}

}  // namespace

RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan) {
  const std::size_t tokens = input.num_tokens;
  plan.per_expert = input.per_expert;
  plan.num_dropped = 0;
  plan.begin.resize(tokens + 1);
  plan.entries.resize(tokens * (input.per_expert ? input.topk : std::min(input.topk, input.num_ranks)));
  plan.topk.resize(tokens * input.topk);
  plan.rank_counts.assign(input.num_ranks, 0);
  plan.expert_counts.assign(input.num_experts, 0);
  plan.num_dropped = 0;
  const RoutingError error =
      input.index64 ? fill_layout<std::int64_t>(input, plan) : fill_layout<std::int32_t>(input, plan);
  // A refused plan routes nothing.
  if (error.bad) {
    plan.num_dropped = 0;
    plan.begin.assign(1, 0);
    plan.entries.clear();
    plan.topk.clear();
    plan.num_dropped = 0;
    plan.rank_counts.assign(input.num_ranks, 0);
    plan.expert_counts.assign(input.num_experts, 0);
  }
  return error;
}

}  // namespace epd::kernels
