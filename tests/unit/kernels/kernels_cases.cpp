#include "kernels_cases.h"

#include "kernels/numbers.h"

#include <cmath>
#include <memory>
#include <ostream>

namespace epd::kernels::testing_cases {

using reference::Layout;
using reference::Payload;
using reference::RankInput;

std::uint32_t between(std::mt19937& random, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
}

Guarded::Guarded(std::size_t bytes, std::size_t shift)
    : bytes_(bytes), storage_(bytes + shift + 3 * kGuard, kPoison) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
  start_ = kGuard + (64 - address % 64) % 64 + shift;
}

void Guarded::expect_intact(const char* what) const {
  for (std::size_t i = 0; i < storage_.size(); ++i) {
    if (i - start_ < bytes_) continue;
    ASSERT_EQ(storage_[i], kPoison) << what << ": stored outside, byte "
                                    << static_cast<std::ptrdiff_t>(i - start_);
  }
}

bool Guarded::is_poison(std::size_t begin, std::size_t end) const {
  const auto first = storage_.begin() + static_cast<std::ptrdiff_t>(start_);
  return std::all_of(first + static_cast<std::ptrdiff_t>(begin), first + static_cast<std::ptrdiff_t>(end),
                     [](std::uint8_t byte) { return byte == kPoison; });
}

RowFormat Case::format() const {
  RowFormat format;
  format.cast = params.payload == Payload::kFp8Cast;
  format.scales = params.scale_format;
  format.hidden = params.hidden;
  format.x_bytes = reference::x_bytes(params);
  format.row_bytes = reference::row_bytes(params);
  format.scale_bytes = reference::scale_bytes(params);
  if (params.scale_layout != abi::ScaleLayout::kColumnMajor || rules.recv_rows == 0) return format;
  const std::uint64_t block = rules.expert_blocks ? rules.expert_capacity : rules.recv_rows;
  format.scale_block_rows = static_cast<std::uint32_t>(block);
  format.scale_pitch = static_cast<std::uint32_t>((block + 3) / 4 * 4);
  return format;
}

std::uint16_t random_bf16(std::mt19937& random, std::uint32_t mood) {
  switch (mood) {
    case 0: return static_cast<std::uint16_t>(random());            // any bits
    case 1: return static_cast<std::uint16_t>(random() & 0x80ffu);  // subnormal or nearly
    default: {
      const float value = static_cast<float>(static_cast<std::int32_t>(random())) * 1e-9f;
      if (random() % 500 == 0) return static_cast<std::uint16_t>(0x7f80 | (random() & 0x8041u));
      return float_to_bf16(value);
    }
  }
}

float random_weight(std::mt19937& random, std::uint32_t mood) {
  if (mood == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  if (mood == 2) return std::ldexp(1.0f, -static_cast<int>(random() % 4));  // ties when rounded
  constexpr float kFew[] = {-1.0f, -0.0f, 0.0f, 1.0f};  // zeros of either sign, and weights that cancel
  if (mood == 3) return kFew[random() % 4];
  return static_cast<float>(random() % 100000) * 1.1e-5f;
}

namespace {

// How one rank's tokens choose.
struct Routing {
  enum Kind { kUniform, kZipf, kOneExpert, kOneRank, kNone, kRepeated, kKinds };
  Kind kind;
  std::uint32_t favourite;
  std::uint32_t none_in;  // one in so many choices is -1; 0: none is
};

Routing random_routing(std::mt19937& random, std::uint32_t num_experts) {
  return {static_cast<Routing::Kind>(between(random, 0, Routing::kKinds - 1)),
          between(random, 0, num_experts - 1), between(random, 0, 8)};
}

std::int64_t random_choice(std::mt19937& random, const reference::GroupParams& params,
                           const Routing& routing) {
  if (routing.none_in != 0 && between(random, 1, routing.none_in) == 1) return -1;
  const std::uint32_t per_rank = params.num_experts / params.num_ranks;
  switch (routing.kind) {
    case Routing::kZipf: {
      const double u = static_cast<double>(random()) / 4294967296.0;
      return static_cast<std::int64_t>(params.num_experts * u * u * u * u);
    }
    case Routing::kOneExpert: return routing.favourite;
    case Routing::kOneRank: return routing.favourite / per_rank * per_rank + between(random, 0, per_rank - 1);
    case Routing::kNone: return -1;
    case Routing::kRepeated: return (routing.favourite + between(random, 0, 2)) % params.num_experts;
    default: return between(random, 0, params.num_experts - 1);
  }
}

void random_values(std::mt19937& random, const reference::GroupParams& params, std::uint32_t mood,
                   RankInput& input) {
  const bool is_bf16 = params.payload == Payload::kBf16 || params.payload == Payload::kFp8Cast;
  const std::size_t bytes = std::size_t{input.num_tokens} * reference::x_bytes(params);
  for (std::size_t i = 0; i < bytes / 2; ++i) {
    const auto value = is_bf16 ? random_bf16(random, mood) : static_cast<std::uint16_t>(random());
    input.x.push_back(static_cast<std::uint8_t>(value));
    input.x.push_back(static_cast<std::uint8_t>(value >> 8));
  }
  if (params.payload != Payload::kFp8) return;
  for (std::size_t i = 0; i < std::size_t{input.num_tokens} * reference::scale_bytes(params); ++i) {
    input.x_scales.push_back(static_cast<std::uint8_t>(random()));
  }
}

RankInput random_input(std::mt19937& random, const reference::GroupParams& params, std::uint32_t tokens) {
  RankInput input;
  input.num_tokens = tokens;
  const std::uint32_t mood = between(random, 0, 5);
  random_values(random, params, mood, input);
  const Routing routing = random_routing(random, params.num_experts);
  for (std::size_t i = 0; i < std::size_t{tokens} * params.topk; ++i) {
    input.topk_idx.push_back(random_choice(random, params, routing));
  }
  if (between(random, 0, 3) != 0) {
    for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
      input.topk_weights.push_back(random_weight(random, mood));
    }
  }
  return input;
}

reference::GroupParams random_params(std::mt19937& random, bool many_ranks) {
  reference::GroupParams params;
  params.num_ranks = many_ranks ? 70 : between(random, 1, 7);
  params.num_experts = params.num_ranks * between(random, 1, many_ranks ? 3 : 9);
  params.hidden = 8 * (between(random, 0, 7) == 0 ? between(random, 50, 150) : between(random, 1, 50));
  params.topk = between(random, 0, 3) == 0 ? between(random, 1, 32) : between(random, 1, 8);
  params.payload = static_cast<Payload>(between(random, 0, 3));
  const bool cast = params.payload == Payload::kFp8Cast;
  params.scale_format = static_cast<ScaleFormat>(between(random, 0, 2));
  if (!cast && params.scale_format == ScaleFormat::kFloat32Pow2) params.scale_format = ScaleFormat::kFloat32;
  params.layout = static_cast<Layout>(between(random, 0, 2));
  const std::vector<std::uint32_t> alignments = {1, 1, 2, 3, 8, 16, 128, 256};
  if (params.layout != Layout::kExpert) params.alignment = alignments[between(random, 0, 7)];
  params.opaque_bytes = 16 * between(random, 1, 70);
  if (between(random, 0, 3) == 0) {
    for (std::uint32_t r = 0; r < params.num_ranks; ++r) params.masked.push_back(between(random, 0, 2) == 0);
    params.masked[between(random, 0, params.num_ranks - 1)] = false;
  }
  return params;
}

RoutingInput routing_input(const Case& c, std::uint32_t rank, const void* topk_idx,
                           std::span<const std::uint8_t> masked) {
  RoutingInput input;
  input.topk_idx = topk_idx;
  input.index64 = c.index64;
  input.per_expert = c.params.layout != Layout::kCompact;
  input.num_tokens = c.inputs[rank].num_tokens;
  input.topk = c.params.topk;
  input.num_ranks = c.params.num_ranks;
  input.num_experts = c.params.num_experts;
  input.masked = masked;
  return input;
}

void build_plans(Case& c) {
  const std::uint32_t ranks = c.params.num_ranks;
  const auto masked = std::make_unique<std::uint8_t[]>(ranks);
  std::copy(c.params.masked.begin(), c.params.masked.end(), masked.get());
  const std::span<const std::uint8_t> mask(masked.get(), c.params.masked.size());
  c.plans.assign(ranks, {});
  for (std::uint32_t r = 0; r < ranks; ++r) {
    if (!c.is_there(r)) continue;
    const std::vector<std::int64_t>& wide = c.inputs[r].topk_idx;
    const std::vector<std::int32_t> narrow(wide.begin(), wide.end());
    const void* idx = c.index64 ? static_cast<const void*>(wide.data()) : narrow.data();
    ASSERT_FALSE(build_routing_plan(routing_input(c, r, idx, mask), c.plans[r]).bad);
    ASSERT_EQ(c.plans[r].num_dropped, reference::dropped_selections(c.params, c.inputs[r]));
  }
}

// Capacity of each expert's block: just enough, or some more.
std::uint32_t enough_for_experts(std::mt19937& random, const Case& c) {
  std::uint32_t most = 0;
  for (std::uint32_t e = 0; e < c.params.num_experts; ++e) {
    std::uint32_t rows = 0;
    for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
      if (c.is_there(r)) rows += c.plans[r].expert_counts[e];
    }
    most = std::max(most, rows);
  }
  return std::max(1u, most + (between(random, 0, 1) == 0 ? 0 : between(random, 1, 5)));
}

}  // namespace

void route(Case& c) {
  ASSERT_NO_FATAL_FAILURE(build_plans(c));
  std::mt19937 random(c.params.hidden);
  const bool blocks = c.params.layout == Layout::kExpert;
  if (blocks) c.params.expert_capacity = enough_for_experts(random, c);
  c.rules.num_ranks = c.params.num_ranks;
  c.rules.num_experts = c.params.num_experts;
  c.rules.per_expert = c.params.layout != Layout::kCompact;
  c.rules.expert_blocks = blocks;
  c.rules.expert_capacity = c.params.expert_capacity;
  c.rules.alignment = c.params.alignment;
  c.rules.recv_rows = blocks ? std::uint64_t{c.experts_per_rank()} * c.params.expert_capacity : 0x7fffffff;
  std::vector<const std::uint32_t*> rank_counts(c.params.num_ranks, nullptr);
  std::vector<const std::uint32_t*> expert_counts(c.params.num_ranks, nullptr);
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    if (!c.is_there(r)) continue;
    rank_counts[r] = c.plans[r].rank_counts.data();
    expert_counts[r] = c.plans[r].expert_counts.data();
  }
  c.placements.assign(c.params.num_ranks, {});
  std::uint64_t room = 0;
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    if (!c.is_there(r)) continue;
    ASSERT_FALSE(place_rows(c.rules, {rank_counts, expert_counts}, r, c.placements[r]).bad);
    room = std::max<std::uint64_t>(room, c.placements[r].num_recv_rows);
  }
  if (!blocks) c.rules.recv_rows = room + between(random, 0, 3);
}

Case random_case(std::uint32_t seed, const host::RowKernels* kernels) {
  std::mt19937 random(seed);
  Case c;
  const bool many_ranks = seed % 50 == 7;
  c.params = random_params(random, many_ranks);
  c.index64 = between(random, 0, 1) == 0;
  c.shift = between(random, 0, 1) == 0 ? 0 : 8 * between(random, 1, 7);
  c.threads = between(random, 0, 5) == 0 ? between(random, 2, 4) : 1;
  c.choice = {kernels, between(random, 0, 1) == 0 ? host::Stores::kCached : host::Stores::kStreaming};
  for (std::uint32_t r = 0; r < c.params.num_ranks; ++r) {
    const bool empty = between(random, 0, 4) == 0 || (many_ranks && between(random, 0, 4) != 0);
    c.inputs.push_back(random_input(random, c.params, empty ? 0 : between(random, 1, 24)));
  }
  route(c);
  if (between(random, 0, 2) != 0) c.params.sum_ranks = between(random, 1, c.params.num_ranks);
  if (reference::scale_bytes(c.params) != 0)
    c.params.scale_layout = static_cast<abi::ScaleLayout>(between(random, 0, 1));
  return c;
}

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "R " << c.params.num_ranks << " E " << c.params.num_experts << " H " << c.params.hidden
             << " K " << c.params.topk << " layout " << static_cast<int>(c.params.layout) << " payload "
             << static_cast<int>(c.params.payload) << " scales " << static_cast<int>(c.params.scale_format)
             << " in " << static_cast<int>(c.params.scale_layout) << " alignment " << c.params.alignment
             << " capacity " << c.params.expert_capacity << " opaque " << c.params.opaque_bytes
             << " sum_ranks " << c.params.sum_ranks << " masked " << c.params.masked.size() << " shift "
             << c.shift << " threads " << c.threads;
}

}  // namespace epd::kernels::testing_cases
