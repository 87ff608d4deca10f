// DeepSeek-V3's expert selection ("noaux_tc"; DeepSeek-V3 Technical Report, 2024, section 2.1.2): scores are
// sigmoids, a bias corrects the choice but not the weight, and a token's experts come from few groups.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace epd::kit {

struct GateConfig {
  std::uint32_t num_experts = 256;
  std::uint32_t topk = 8;
  std::uint32_t num_groups = 8;
  std::uint32_t groups_kept = 4;
  float scale = 2.5f;
};

// "" if usable. Otherwise says what is wrong and what is allowed.
std::string gate_error(const GateConfig& config);

float sigmoid(float logit);

// scores, bias: [E]. Writes K experts, best first (ties: the lower number), and their weights:
// score / (sum of the K scores) * scale. A group counts as the sum of its two best biased scores.
void select_experts(const GateConfig& config, std::span<const float> scores, std::span<const float> bias,
                    std::int32_t* idx, float* weights);

}  // namespace epd::kit
