// Collects the summands of one token's rows, in the form that the row kernels take. Internal.
#pragma once

#include "host/row_kernels.h"

#include <cstdint>
#include <span>
#include <vector>

namespace epd::kernels::host {

// Filled for one token after the other: biases first, then rows, ranks ascending.
class TokenSum {
 public:
  // `sum_ranks`: as in CombineArgs, of `num_ranks`. `rows`: of a token, at most.
  TokenSum(bool per_expert, std::uint32_t owner, std::uint32_t sum_ranks, std::size_t num_ranks,
           std::size_t rows)
      : per_expert_(per_expert),
        by_domains_(sum_ranks != 0 && sum_ranks < num_ranks),
        owner_(owner),
        sum_ranks_(sum_ranks) {
    rows_.reserve(rows);
    partial_sums_.reserve(rows);
    if (by_domains_) domains_.reserve(rows + 1);
  }

  void begin() {
    rows_.clear();
    partial_sums_.clear();
    domains_.clear();
    domain_end_ = 0;
    last_rank_ = kNoRank;
    if (by_domains_) begin_domain(false);
  }

  // A bias is a row like others, of a partial sum of its own: multiplied by 1 and rounded to bf16 it stays
  // what it is.
  void add_bias(const std::uint16_t* bias) { add_summand(bias); }

  // A row of the rank. Per-expert plans: or its partial sum, with weight 1. A row of weight 0 is left out.
  void add_row(std::uint32_t rank, const std::uint16_t* row, float weight) {
    if (weight == 0.0f) return;
    rows_.push_back({row, weight});
    if (!per_expert_ || rank != last_rank_) begin_rank(rank);
    if (per_expert_) ++partial_sums_.back();
    last_rank_ = rank;
  }

  // The sum, rounded to bf16, of all rows in a domain that is not the owner's. It is added as it is, and so
  // keeps the sign of a zero.
  void add_domain_sum(const std::uint16_t* sum) {
    begin_domain(false);
    add_summand(sum);
  }

  RowSum sum(bool weighted) const { return {rows_, partial_sums_, domains_, weighted}; }

 private:
  static constexpr std::uint32_t kNoRank = 0xffffffff;

  void add_summand(const std::uint16_t* row) {
    rows_.push_back({row, 1.0f});
    if (per_expert_) partial_sums_.push_back(1);
    if (by_domains_) ++domains_.back().summands;
  }

  // Begins the domain of the biases, then each domain that has rows of the token.
  void begin_domain(bool rounded) { domains_.push_back({0, rounded}); }

  // A row of the rank, or of a per-expert plan its partial sum. Ranks ascend.
  void begin_rank(std::uint32_t rank) {
    if (per_expert_) partial_sums_.push_back(0);
    if (!by_domains_) return;
    if (rank >= domain_end_) {
      const std::uint32_t domain = rank / sum_ranks_;
      begin_domain(domain != owner_ / sum_ranks_);
      domain_end_ = (domain + 1) * sum_ranks_;
    }
    ++domains_.back().summands;
  }

  const bool per_expert_;
  const bool by_domains_;  // there are several, and not every token has rows of one only
  const std::uint32_t owner_;
  const std::uint32_t sum_ranks_;
  std::vector<WeightedRow> rows_;
  std::vector<std::uint32_t> partial_sums_;  // per-expert plans: rows of each rank
  std::vector<SumDomain> domains_;
  std::uint32_t domain_end_ = 0;  // the first rank after the last of domains_
  std::uint32_t last_rank_ = kNoRank;
};

}  // namespace epd::kernels::host
