#include "kit/gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace epd::kit {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

float top_two_sum(std::span<const float> values) {
  float best = kNone;
  float second = kNone;
  for (const float value : values) {
    if (value > best) {
      second = best;
      best = value;
    } else if (value > second) {
      second = value;
    }
  }
  return values.size() > 1 ? best + second : best;
}

// The first of the largest values, which is then taken out.
std::uint32_t take_best(std::span<float> values) {
  const auto best = std::max_element(values.begin(), values.end());
  *best = kNone;
  return static_cast<std::uint32_t>(best - values.begin());
}

}  // namespace

std::string gate_error(const GateConfig& config) {
  auto number = [](std::uint32_t value) { return std::to_string(value); };
  if (config.num_groups == 0 || config.num_experts % config.num_groups != 0) {
    return "experts is " + number(config.num_experts) + "; the group-limited gate allows multiples of " +
           number(config.num_groups);
  }
  if (config.groups_kept == 0 || config.groups_kept > config.num_groups) {
    return "groups kept is " + number(config.groups_kept) + "; allowed: 1.." + number(config.num_groups);
  }
  const std::uint32_t reachable = config.num_experts / config.num_groups * config.groups_kept;
  if (config.topk == 0 || config.topk > reachable) {
    return "topk is " + number(config.topk) + "; the group-limited gate reaches " + number(reachable) +
           " experts, so 1.." + number(reachable) + " are allowed";
  }
  return "";
}

float sigmoid(float logit) {
  return 1.0f / (1.0f + std::exp(-logit));
}

void select_experts(const GateConfig& config, std::span<const float> scores, std::span<const float> bias,
                    std::int32_t* idx, float* weights) {
  const std::size_t per_group = config.num_experts / config.num_groups;
  thread_local std::vector<float> biased;
  thread_local std::vector<float> kept;
  thread_local std::vector<float> groups;
  biased.resize(config.num_experts);
  groups.resize(config.num_groups);
  for (std::size_t e = 0; e < biased.size(); ++e) biased[e] = scores[e] + bias[e];
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g] = top_two_sum(std::span<const float>(biased).subspan(g * per_group, per_group));
  }
  kept.assign(config.num_experts, kNone);
  for (std::uint32_t i = 0; i < config.groups_kept; ++i) {
    const std::size_t begin = take_best(groups) * per_group;
    std::copy_n(biased.begin() + static_cast<std::ptrdiff_t>(begin), per_group,
                kept.begin() + static_cast<std::ptrdiff_t>(begin));
  }
  float sum = 0.0f;
  for (std::uint32_t k = 0; k < config.topk; ++k) {
    const std::uint32_t expert = take_best(kept);
    idx[k] = static_cast<std::int32_t>(expert);
    weights[k] = scores[expert];
    sum += weights[k];
  }
  const float factor = config.scale / std::max(sum, 1e-20f);
  for (std::uint32_t k = 0; k < config.topk; ++k) weights[k] *= factor;
}

}  // namespace epd::kit
