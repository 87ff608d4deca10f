// The random inputs of kernels_test: shapes, routings, values; and the shape as kernels are told.
#pragma once

#include "kernels/cuda.h"
#include "kernels/reference.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

namespace epd::gpu_test {

namespace ref = kernels::reference;
using kernels::ScaleFormat;
using Random = std::mt19937_64;

enum class Pattern { kUniform, kZipf, kOneExpert, kNone, kSparse, kDuplicates };
inline const char* const kPatterns[] = {"uniform", "zipf", "one-expert", "none", "sparse", "duplicates"};

struct Case {
  ref::GroupParams group;
  std::vector<std::uint32_t> tokens;  // of each rank
  Pattern pattern = Pattern::kUniform;
  bool index64 = true;
  bool weights = true;    // dispatch delivers weights
  bool weighted = false;  // combine
  abi::ReturnWeights return_weights = abi::kReturnNone;
  std::uint32_t biases = 0;
  bool mark_unused = false;
  bool zero_padding = false;
  bool cached = false;  // a second dispatch reuses the routing
  bool inbox = false;
  std::uint32_t inboxes = 1;
  std::uint32_t sms = 24;
  std::uint32_t stages = 1;

  std::string text() const {
    static const char* const layouts[] = {"compact", "packed", "expert"};
    static const char* const payloads[] = {"bf16", "fp8-cast", "fp8", "opaque"};
    char line[400];
    std::snprintf(line, sizeof(line),
                  "%s %s scales=%d columns=%d ranges=%d R=%u E=%u H=%u K=%u n0=%u align=%u %s idx%d w=%d%d "
                  "rw=%u b=%u mark=%d%d cached=%d "
                  "masked=%d inbox=%d sms=%u stages=%u",
                  layouts[static_cast<int>(group.layout)], payloads[static_cast<int>(group.payload)],
                  static_cast<int>(group.scale_format), static_cast<int>(group.scale_layout),
                  static_cast<int>(group.range_format), group.num_ranks, group.num_experts, group.hidden,
                  group.topk, tokens[0], group.alignment, kPatterns[static_cast<int>(pattern)],
                  index64 ? 64 : 32, weights, weighted, static_cast<unsigned>(return_weights), biases,
                  mark_unused, zero_padding, cached, !group.masked.empty(), inbox, sms, stages);
    return line;
  }
};

inline kernels::Shape shape_of(const Case& c, std::uint64_t recv_rows) {
  const ref::GroupParams& g = c.group;
  kernels::Shape s;
  s.num_ranks = g.num_ranks;
  s.num_experts = g.num_experts;
  s.topk = g.topk;
  s.hidden = g.hidden;
  s.per_expert = g.layout != ref::Layout::kCompact;
  s.expert_blocks = g.layout == ref::Layout::kExpert;
  s.index64 = c.index64;
  s.alignment = g.alignment;
  s.expert_capacity = g.expert_capacity;
  s.recv_rows = recv_rows;
  s.format = {g.payload == ref::Payload::kFp8Cast,
              g.scale_format,
              g.hidden,
              ref::x_bytes(g),
              ref::row_bytes(g),
              ref::scale_bytes(g)};
  s.packed_ranges = g.range_format == abi::RangeFormat::kPacked64;
  if (g.scale_layout == abi::ScaleLayout::kColumnMajor && recv_rows != 0) {
    const std::uint64_t rows = s.expert_blocks ? g.expert_capacity : recv_rows;
    s.format.scale_block_rows = static_cast<std::uint32_t>(rows);
    s.format.scale_pitch = static_cast<std::uint32_t>((rows + 3) / 4 * 4);
  }
  return s;
}

inline std::uint32_t pick(Random& random, std::initializer_list<std::uint32_t> values) {
  return values.begin()[random() % values.size()];
}

inline Case random_case(Random& random, std::uint32_t max_hidden) {
  Case c;
  ref::GroupParams& g = c.group;
  g.num_ranks = pick(random, {1, 2, 3, 4, 4, 4, 5, 8});
  g.num_experts = g.num_ranks * pick(random, {1, 2, 3, 8, 16, 64});
  g.topk = std::min(pick(random, {1, 2, 3, 6, 8, 8, 8, 9, 32}), 32u);
  g.hidden = std::min(pick(random, {8, 24, 136, 264, 384, 1000, 1024, 2048, 2880, 7168}), max_hidden);
  g.layout = static_cast<ref::Layout>(random() % 3);
  g.payload = static_cast<ref::Payload>(random() % 4);
  if (random() % 3 == 0) g.payload = ref::Payload::kFp8Cast;
  if (g.payload == ref::Payload::kFp8Cast) g.scale_format = static_cast<ScaleFormat>(random() % 3);
  if (g.payload == ref::Payload::kFp8 && random() % 2) g.scale_format = ScaleFormat::kUe8m0;
  if (g.payload == ref::Payload::kOpaque) g.opaque_bytes = 16 * (1 + random() % 64);
  g.alignment = g.layout == ref::Layout::kExpert ? 1 : pick(random, {1, 1, 4, 128});
  if (g.num_ranks > 2 && random() % 6 == 0) {
    g.masked.assign(g.num_ranks, false);
    g.masked[random() % g.num_ranks] = true;
  }
  const std::uint32_t most = pick(random, {1, 5, 33, 64, 130});
  for (std::uint32_t r = 0; r < g.num_ranks; ++r) {
    c.tokens.push_back(random() % 5 == 0 ? 0 : static_cast<std::uint32_t>(random() % (most + 1)));
  }
  c.pattern = static_cast<Pattern>(random() % 6);
  c.index64 = random() % 2;
  c.weights = random() % 4 != 0;
  c.weighted = random() % 2;
  c.return_weights = static_cast<abi::ReturnWeights>(random() % 3);
  c.biases = random() % 3 == 0 ? random() % 3 : 0;
  c.mark_unused = random() % 4 == 0;
  c.zero_padding = random() % 2;
  c.cached = random() % 3 == 0;
  c.sms = pick(random, {1, 2, 8, 16});
  c.stages = pick(random, {1, 2, 3});
  c.inbox = g.layout != ref::Layout::kCompact && random() % 3 != 0;
  c.inboxes = 1 + random() % 3;
  if (ref::scale_bytes(g) != 0) g.scale_layout = static_cast<abi::ScaleLayout>(random() % 2);
  if (g.layout != ref::Layout::kCompact) g.range_format = static_cast<abi::RangeFormat>(random() % 2);
  return c;
}

inline std::uint16_t random_bf16(Random& random) {
  const auto bits = static_cast<std::uint16_t>(random());
  if (random() % 64 == 0) return bits;  // anything: NaN, Inf, subnormal
  return static_cast<std::uint16_t>((bits & 0x807f) | (112 + random() % 24) << 7);
}

inline std::vector<std::uint16_t> random_bf16s(Random& random, std::size_t count) {
  std::vector<std::uint16_t> values(count);
  for (auto& value : values) value = random_bf16(random);
  return values;
}

inline std::vector<float> random_floats(Random& random, std::size_t count) {
  std::vector<float> values(count);
  for (auto& value : values)
    value = static_cast<float>(static_cast<std::int64_t>(random() % 2001) - 1000) / 700.0f;
  return values;
}

// Some inputs have many weights of 0, of either sign, and weights that cancel each other.
inline std::vector<float> random_weights(Random& random, std::size_t count) {
  constexpr float kFew[] = {-1.0f, -0.0f, 0.0f, 1.0f};
  std::vector<float> weights = random_floats(random, count);
  if (random() % 3 != 0) return weights;
  for (float& weight : weights) weight = kFew[random() % 4];
  return weights;
}

// Every negative number is no selection.
inline std::int64_t no_selection(Random& random, const Case& c) {
  const std::int64_t values[] = {-1, -2, INT32_MIN, c.index64 ? INT64_MIN : -3};
  return values[random() % 4];
}

inline std::int64_t random_expert(Random& random, const Case& c) {
  const std::uint32_t experts = c.group.num_experts;
  switch (c.pattern) {
    case Pattern::kUniform: return static_cast<std::int64_t>(random() % experts);
    case Pattern::kZipf: {
      const double u = static_cast<double>(random() % 1000000 + 1) / 1000000.0;
      return std::min<std::int64_t>(experts - 1, static_cast<std::int64_t>(1.0 / u) - 1);
    }
    case Pattern::kOneExpert: return experts / 2;
    case Pattern::kNone: return no_selection(random, c);
    case Pattern::kSparse:
      return random() % 4 != 0 ? no_selection(random, c) : static_cast<std::int64_t>(random() % experts);
    case Pattern::kDuplicates: break;
  }
  return static_cast<std::int64_t>(random() % std::min(experts, 3u));
}

inline ref::RankInput random_input(Random& random, const Case& c, std::uint32_t tokens) {
  const ref::GroupParams& g = c.group;
  ref::RankInput input;
  input.num_tokens = tokens;
  input.x.resize(std::size_t{tokens} * ref::x_bytes(g));
  if (g.payload == ref::Payload::kBf16 || g.payload == ref::Payload::kFp8Cast) {
    const auto values = random_bf16s(random, std::size_t{tokens} * g.hidden);
    if (!values.empty()) std::memcpy(input.x.data(), values.data(), input.x.size());
  } else {
    for (auto& byte : input.x) byte = static_cast<std::uint8_t>(random());
  }
  if (g.payload == ref::Payload::kFp8) {
    input.x_scales.resize(std::size_t{tokens} * ref::scale_bytes(g));
    for (auto& byte : input.x_scales) byte = static_cast<std::uint8_t>(random());
  }
  input.topk_idx.resize(std::size_t{tokens} * g.topk);
  for (auto& expert : input.topk_idx) expert = random_expert(random, c);
  if (c.weights || c.weighted) input.topk_weights = random_weights(random, input.topk_idx.size());
  return input;
}

}  // namespace epd::gpu_test
