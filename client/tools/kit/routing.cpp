#include "kit/routing.h"

#include "kit/error.h"
#include "kit/random.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <istream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <vector>

namespace epd::kit {

// ---- gate

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

// ---- routing

namespace {

constexpr int kTries = 64;  // before a draw takes the next free expert instead

bool taken(const std::int32_t* idx, std::uint32_t count, std::uint32_t expert) {
  return std::find(idx, idx + count, static_cast<std::int32_t>(expert)) != idx + count;
}

// K different experts, each by `draw()`.
template <typename Draw>
void draw_distinct(std::uint32_t topk, std::uint32_t num_experts, Draw draw, std::int32_t* idx) {
  for (std::uint32_t k = 0; k < topk; ++k) {
    std::uint32_t expert = draw();
    for (int tries = 0; tries < kTries && taken(idx, k, expert); ++tries) expert = draw();
    while (taken(idx, k, expert)) expert = (expert + 1) % num_experts;
    idx[k] = static_cast<std::int32_t>(expert);
  }
}

void random_weights(Random& random, std::uint32_t topk, const std::int32_t* idx, float* weights) {
  float sum = 0.0f;
  for (std::uint32_t k = 0; k < topk; ++k) {
    weights[k] = idx[k] < 0 ? 0.0f : 0.05f + static_cast<float>(random.unit());
    sum += weights[k];
  }
  for (std::uint32_t k = 0; k < topk && sum > 0.0f; ++k) weights[k] /= sum;
}

// Sigmoids of normally distributed logits, no bias.
void group_limited_token(Random& random, const GateConfig& gate, std::int32_t* idx, float* weights) {
  thread_local std::vector<float> scores;
  thread_local std::vector<float> bias;
  scores.resize(gate.num_experts);
  bias.assign(gate.num_experts, 0.0f);
  for (float& score : scores) score = sigmoid(random.normal());
  select_experts(gate, scores, bias, idx, weights);
}

using Json = nlohmann::json;

std::vector<std::int64_t> numbers_of_json(const std::string& line, const std::string& where) {
  const Json parsed = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const Json* list = &parsed;
  if (parsed.is_object()) {
    const auto found = parsed.find("topk");
    if (found == parsed.end()) fail(where + ": the object has no list named \"topk\"");
    list = &*found;
  }
  if (!list->is_array()) fail(where + ": not a JSON list of experts");
  std::vector<std::int64_t> numbers;
  for (const Json& item : *list) {
    if (!item.is_number_integer()) fail(where + ": " + item.dump() + " is not an expert's number");
    numbers.push_back(item.get<std::int64_t>());
  }
  return numbers;
}

std::vector<std::int64_t> numbers_of_text(const std::string& line, const std::string& where) {
  std::vector<std::int64_t> numbers;
  std::size_t begin = 0;
  while ((begin = line.find_first_not_of(" ,\t\r", begin)) != std::string::npos) {
    const std::size_t end = std::min(line.find_first_of(" ,\t\r", begin), line.size());
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(line.data() + begin, line.data() + end, value);
    if (error != std::errc{} || stop != line.data() + end) {
      fail(where + ": '" + line.substr(begin, end - begin) + "' is not an expert's number");
    }
    numbers.push_back(value);
    begin = end;
  }
  return numbers;
}

}  // namespace

RoutingSpec parse_routing(const std::string& name) {
  RoutingSpec spec;
  spec.name = name;
  if (name == "uniform") {
    spec.kind = RoutingKind::kUniform;
  } else if (name == "zipf") {
    spec.kind = RoutingKind::kZipf;
  } else if (name == "group-limited") {
    spec.kind = RoutingKind::kGroupLimited;
  } else if (name == "one-expert") {
    spec.kind = RoutingKind::kOneExpert;
  } else {
    spec.kind = RoutingKind::kFile;
  }
  return spec;
}

RoutingSource::RoutingSource(const RoutingSpec& spec) : spec_(spec) {
  if (spec.topk == 0 || spec.topk > spec.num_experts) {
    fail("topk is " + std::to_string(spec.topk) + "; allowed: 1.." + std::to_string(spec.num_experts) +
         " (the number of experts)");
  }
  if (spec.kind == RoutingKind::kGroupLimited) {
    const std::string error = gate_error({.num_experts = spec.num_experts, .topk = spec.topk, .scale = 1.0f});
    if (!error.empty()) fail(error);
  }
  if (spec.kind == RoutingKind::kFile) {
    table_ = read_routing_file(spec.name, spec.num_experts, spec.topk);
  }
  if (spec.kind == RoutingKind::kZipf) {
    popularity_.resize(spec.num_experts);
    std::iota(popularity_.begin(), popularity_.end(), 0u);
    Random random(derive(spec.seed, 0x21bf));
    for (std::uint32_t i = spec.num_experts; i > 1; --i) {
      std::swap(popularity_[i - 1], popularity_[random.below(i)]);
    }
    double sum = 0;
    for (std::uint32_t i = 0; i < spec.num_experts; ++i) cumulative_.push_back(sum += 1.0 / (i + 1));
  }
}

void RoutingSource::fill(const RoutingRequest& request, std::int32_t* idx, float* weights) const {
  const std::uint32_t topk = spec_.topk;
  const std::uint32_t experts = spec_.num_experts;
  const std::uint64_t seed = derive(spec_.seed, request.iteration);
  Random random(derive(seed, request.rank));
  const auto hot = static_cast<std::int32_t>(Random(seed).below(experts));
  const GateConfig gate{.num_experts = experts, .topk = topk, .scale = 1.0f};
  const std::uint64_t lines = table_.size() / topk;
  const std::uint64_t first =
      (request.iteration * request.num_ranks + request.rank) * std::uint64_t{request.num_tokens};
  for (std::uint32_t t = 0; t < request.num_tokens; ++t, idx += topk, weights += topk) {
    switch (spec_.kind) {
      case RoutingKind::kUniform:
        draw_distinct(
            topk, experts, [&] { return random.below(experts); }, idx);
        break;
      case RoutingKind::kZipf:
        draw_distinct(
            topk, experts,
            [&] {
              const double place = random.unit() * cumulative_.back();
              const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), place);
              const auto i = std::min<std::size_t>(static_cast<std::size_t>(found - cumulative_.begin()),
                                                   popularity_.size() - 1);
              return popularity_[i];
            },
            idx);
        break;
      case RoutingKind::kGroupLimited: group_limited_token(random, gate, idx, weights); continue;
      case RoutingKind::kOneExpert:
        std::fill_n(idx, topk, -1);
        idx[0] = hot;
        break;
      case RoutingKind::kFile:
        std::copy_n(table_.begin() + static_cast<std::ptrdiff_t>((first + t) % lines * topk), topk, idx);
        break;
    }
    random_weights(random, topk, idx, weights);
  }
}

std::vector<std::int32_t> read_routing(std::istream& in, const std::string& name, std::uint32_t num_experts,
                                       std::uint32_t topk) {
  std::vector<std::int32_t> table;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    const std::string where = name + ":" + std::to_string(number);
    const bool json = line[first] == '[' || line[first] == '{';
    const auto numbers = json ? numbers_of_json(line, where) : numbers_of_text(line, where);
    if (numbers.empty() || numbers.size() > topk) {
      fail(where + ": " + std::to_string(numbers.size()) + " experts; allowed: 1.." + std::to_string(topk) +
           " (topk)");
    }
    for (const std::int64_t value : numbers) {
      if (value >= std::int64_t{num_experts}) {
        fail(where + ": expert " + std::to_string(value) + "; allowed: 0.." +
             std::to_string(num_experts - 1) + ", or a negative number: no selection");
      }
      table.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(value, -1)));
    }
    table.insert(table.end(), topk - numbers.size(), -1);
  }
  if (table.empty()) fail(name + ": no token in it; allowed: at least one line with a top-k list");
  return table;
}

std::vector<std::int32_t> read_routing_file(const std::string& path, std::uint32_t num_experts,
                                            std::uint32_t topk) {
  std::ifstream file(path);
  if (!file) {
    fail("routing '" + path +
         "' is not a file that can be read; allowed: uniform, zipf, group-limited, one-expert, or a path");
  }
  return read_routing(file, path, num_experts, topk);
}

void write_routing_line(std::ostream& out, const RoutingLine& line) {
  Json list = Json::array();
  for (const std::int32_t expert : line.topk) {
    if (expert >= 0) list.push_back(expert);
  }
  const Json object{{"step", line.step}, {"layer", line.layer}, {"rank", line.rank}, {"topk", list}};
  out << object.dump() << '\n';
}

}  // namespace epd::kit
