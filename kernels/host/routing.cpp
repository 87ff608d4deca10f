#include "kernels/routing.h"

#include "host/rank_of_expert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <numeric>

namespace epd::kernels {
namespace {

// The choices of one token by rank, for up to 64 ranks: a bit for each rank, and the set of each rank's
// choices.
class ChoicesByRank {
 public:
  void clear() {}  // visiting empties it
  void add(std::uint32_t rank, std::uint32_t k) {
    ranks_ |= std::uint64_t{1} << rank;
    choices_[rank] |= std::uint32_t{1} << k;
  }
  // Visits the ranks in ascending order, each with the set of its choices.
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

// Appends entries to a plan. Each plan has one writer.
class EntryWriter {
 public:
  explicit EntryWriter(RoutingPlan& plan) : plan_(plan), next_(plan.entries.data()) {
    if (plan.per_expert) last_token_.assign(plan.expert_counts.size(), 0);
  }
  std::uint32_t written() const { return static_cast<std::uint32_t>(next_ - plan_.entries.data()); }

  // Returns whether the choice needs a row of its own.
  template <bool kPerExpert>
  bool wants_row(std::uint32_t token, std::uint32_t expert, std::uint32_t rank) {
    if constexpr (!kPerExpert) {
      ++plan_.expert_counts[expert];
      return true;
    }
    const bool first = last_token_[expert] != token + 1;
    last_token_[expert] = token + 1;
    if (!first) [[unlikely]]
      ++plan_.repeats[rank];
    return first;
  }

  // Appends the token's rows to `rank`, for the choices in the set `ks`.
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
  std::vector<std::uint32_t> last_token_;  // [E] the last token that chose the expert, plus one
};

}  // namespace

// The loop over tokens, in pieces.
class RoutingPlanner::Filler {
 public:
  virtual ~Filler() = default;
  virtual RoutingError fill(std::uint32_t begin, std::uint32_t end) = 0;
  virtual std::uint32_t written() const = 0;
};

namespace {

template <typename Index, bool kPerExpert, typename Choices>
class FillerOf final : public RoutingPlanner::Filler {
 public:
  FillerOf(const RoutingInput& input, Choices choices, RoutingPlan& plan)
      : input_(input),
        plan_(plan),
        rank_of_expert_(input.num_experts / input.num_ranks),
        choices_(std::move(choices)),
        writer_(plan) {}

  std::uint32_t written() const override { return writer_.written(); }

  RoutingError fill(std::uint32_t begin, std::uint32_t end) override {
    // volatile: the value that is checked is the value that is used
    const std::size_t first = std::size_t{begin} * input_.topk;
    const auto* given = static_cast<const volatile Index*>(input_.topk_idx) + first;
    std::int32_t* chosen = plan_.topk.data() + first;
    for (std::uint32_t token = begin; token < end; ++token, chosen += input_.topk) {
      plan_.begin[token] = writer_.written();
      choices_.clear();
      for (std::uint32_t k = 0; k < input_.topk; ++k) {
        const std::int64_t value = *given++;
        if (value >= std::int64_t{input_.num_experts}) return {true, token, k, value};
        chosen[k] = value < 0 ? -1 : static_cast<std::int32_t>(value);
        if (value < 0) continue;
        const auto expert = static_cast<std::uint32_t>(value);
        const std::uint32_t rank = rank_of_expert_(expert);
        if (!input_.masked.empty() && input_.masked[rank] != 0) [[unlikely]] {
          chosen[k] = -1;
          ++plan_.num_dropped;
          continue;
        }
        if (writer_.template wants_row<kPerExpert>(token, expert, rank)) choices_.add(rank, k);
      }
      choices_.visit_ascending([&](std::uint32_t rank, std::uint32_t ks) {
        writer_.template write<kPerExpert>(rank, ks, chosen);
      });
    }
    return {};
  }

 private:
  const RoutingInput& input_;
  RoutingPlan& plan_;
  const host::RankOfExpert rank_of_expert_;
  Choices choices_;
  EntryWriter writer_;
};

template <typename Index, bool kPerExpert>
std::unique_ptr<RoutingPlanner::Filler> filler_any(const RoutingInput& input, RoutingPlan& plan) {
  if (input.num_ranks <= 64)
    return std::make_unique<FillerOf<Index, kPerExpert, ChoicesByRank>>(input, ChoicesByRank{}, plan);
  return std::make_unique<FillerOf<Index, kPerExpert, SortedChoices>>(input, SortedChoices{input.topk}, plan);
}

template <typename Index>
std::unique_ptr<RoutingPlanner::Filler> filler_layout(const RoutingInput& input, RoutingPlan& plan) {
  return input.per_expert ? filler_any<Index, true>(input, plan) : filler_any<Index, false>(input, plan);
}

// Empties a plan whose input is invalid.
void refuse(const RoutingInput& input, RoutingPlan& plan) {
  plan.num_dropped = 0;
  plan.begin.assign(1, 0);
  plan.entries.clear();
  plan.topk.clear();
  plan.rank_counts.assign(input.num_ranks, 0);
  plan.expert_counts.assign(input.num_experts, 0);
  plan.repeats.assign(input.num_ranks, 0);
}

}  // namespace

RoutingPlanner::RoutingPlanner(const RoutingInput& input, RoutingPlan& plan) : input_(input), plan_(plan) {
  const std::size_t tokens = input.num_tokens;
  plan.per_expert = input.per_expert;
  plan.num_dropped = 0;
  plan.begin.resize(tokens + 1);
  plan.entries.resize(tokens * (input.per_expert ? input.topk : std::min(input.topk, input.num_ranks)));
  plan.topk.resize(tokens * input.topk);
  plan.rank_counts.assign(input.num_ranks, 0);
  plan.expert_counts.assign(input.num_experts, 0);
  plan.repeats.assign(input.num_ranks, 0);
  filler_ =
      input.index64 ? filler_layout<std::int64_t>(input_, plan) : filler_layout<std::int32_t>(input_, plan);
}

RoutingPlanner::~RoutingPlanner() = default;

bool RoutingPlanner::advance(std::uint32_t tokens) {
  const std::uint32_t end = token_ + std::min(tokens, input_.num_tokens - token_);
  error_ = filler_->fill(token_, end);
  if (error_.bad) {
    refuse(input_, plan_);
    return true;
  }
  token_ = end;
  if (token_ != input_.num_tokens) return false;
  plan_.begin[token_] = filler_->written();
  plan_.entries.resize(filler_->written());
  return true;
}

RoutingError build_routing_plan(const RoutingInput& input, RoutingPlan& plan) {
  RoutingPlanner planner(input, plan);
  planner.advance(input.num_tokens);
  return planner.error();
}

std::uint32_t RoutingPlan::selections_of(std::uint32_t rank) const {
  const std::size_t experts = expert_counts.size() / rank_counts.size();
  const auto first = expert_counts.begin() + static_cast<std::ptrdiff_t>(rank * experts);
  return std::accumulate(first, first + static_cast<std::ptrdiff_t>(experts), repeats[rank]);
}

}  // namespace epd::kernels
