// The sum of the weights that come back with a token's rows, choice by choice: CombineArgs::sum_weights.
// Internal.
#pragma once

#include "host/weights.h"
#include "proto/shape.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace epd::kernels::host {

// Filled for one token after the other, ranks ascending. Weights are [K].
class WeightSum {
 public:
  // `sum_ranks`: as in CombineArgs, of `num_ranks`.
  WeightSum(std::uint32_t topk, std::uint32_t owner, std::uint32_t sum_ranks, std::size_t num_ranks)
      : topk_(topk), domain_ranks_(sum_ranks != 0 && sum_ranks < num_ranks ? sum_ranks : kNoDomains) {
    owners_ = owner / domain_ranks_;
  }

  void begin() {
    sum_.fill(0.0f);
    domain_ = owners_;
  }

  // The weights of the rank's row.
  void add(std::uint32_t rank, const float* weights) {
    enter(rank / domain_ranks_);
    add_to(domain_ == owners_ ? sum_ : of_domain_, weights);
  }
  // The sum of all rows in a domain that is not the owner's.
  void add_domain_sum(const float* weights) {
    enter(owners_);
    add_to(sum_, weights);
  }

  void store(float* out) {
    enter(owners_);
    std::transform(sum_.begin(), sum_.begin() + topk_, out, canonical);
  }

 private:
  static constexpr std::uint32_t kNoDomains = 0xffffffff;  // all ranks are in one
  using Floats = std::array<float, abi::kMaxTopk>;

  void enter(std::uint32_t domain) {
    if (domain == domain_) return;
    if (domain_ != owners_) add_to(sum_, of_domain_.data());
    of_domain_.fill(0.0f);
    domain_ = domain;
  }
  void add_to(Floats& sum, const float* weights) const {
    for (std::uint32_t k = 0; k < topk_; ++k) sum[k] += weights[k];
  }

  const std::uint32_t topk_;
  const std::uint32_t domain_ranks_;
  std::uint32_t owners_;  // the owner's domain
  Floats sum_{};
  std::uint32_t domain_ = 0;  // to which rows are being added
  Floats of_domain_{};        // its sum, unless it is the owner's
};

}  // namespace epd::kernels::host
