// Top-k choices for a rank's tokens: generated from a seed, or replayed from a file.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

namespace epd::kit {

// DeepSeek-V3's expert selection ("noaux_tc"; DeepSeek-V3 Technical Report, 2024, section 2.1.2): scores are
// sigmoids, a bias corrects the choice but not the weight, and a token's experts come from few groups.
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

enum class RoutingKind {
  kUniform,       // K different experts, all equally likely
  kZipf,          // K different experts, the i-th most popular with weight 1/i
  kGroupLimited,  // DeepSeek-V3's gate on random logits
  kOneExpert,     // every token of all ranks to one expert, another one in each iteration
  kFile,
};

struct RoutingSpec {
  RoutingKind kind = RoutingKind::kUniform;
  std::string name = "uniform";  // as the user wrote it; the path for kFile
  std::uint32_t num_experts = 256;
  std::uint32_t topk = 8;
  std::uint64_t seed = 1;
};

// One rank's call.
struct RoutingRequest {
  std::uint32_t rank = 0;
  std::uint32_t num_ranks = 1;
  std::uint32_t num_tokens = 0;
  std::uint64_t iteration = 0;
};

// Same arguments, same choices, in every process.
class RoutingSource {
 public:
  // Reads the file for kFile. Throws ToolError if the gate, K or the file doesn't fit.
  explicit RoutingSource(const RoutingSpec& spec);

  // Fills idx and weights [n,K]; weights are positive and sum to 1 per token, 0 where idx is -1.
  void fill(const RoutingRequest& request, std::int32_t* idx, float* weights) const;
  const RoutingSpec& spec() const { return spec_; }

 private:
  RoutingSpec spec_;
  std::vector<std::uint32_t> popularity_;  // zipf: experts, the most popular first
  std::vector<double> cumulative_;         // zipf
  std::vector<std::int32_t> table_;        // file: [lines,K]
};

// "uniform", "zipf", "group-limited", "one-expert", or the path of a file.
RoutingSpec parse_routing(const std::string& name);

// The routing file (README.md), lines filled up to K with -1. Throws ToolError naming line and value.
std::vector<std::int32_t> read_routing_file(const std::string& path, std::uint32_t num_experts,
                                            std::uint32_t topk);
// The same from a stream; `name` is for messages.
std::vector<std::int32_t> read_routing(std::istream& in, const std::string& name, std::uint32_t num_experts,
                                       std::uint32_t topk);

struct RoutingLine {
  std::uint32_t step = 0;
  std::uint32_t layer = 0;
  std::uint32_t rank = 0;
  std::span<const std::int32_t> topk;  // -1 entries are left out
};
void write_routing_line(std::ostream& out, const RoutingLine& line);

}  // namespace epd::kit
