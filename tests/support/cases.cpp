#include "support/cases.h"

#include <algorithm>
#include <cstring>

namespace epd::test {
namespace {

constexpr int kPoison = 0xa5;

// SplitMix64: fast, and the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(next() % bound); }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

 private:
  std::uint64_t state_;
};

std::uint64_t mixed(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  Random random(a * 0x2545f4914f6cdd1dull ^ b);
  random = Random(random.next() ^ (c << 32) ^ d);
  return random.next();
}

// Finite values of middling size: sums of them round, and never overflow.
void fill_finite(Random& random, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += 4) {
    std::uint64_t bits = random.next();
    for (std::size_t j = i; j < std::min(i + 4, count); ++j, bits >>= 16) {
      const auto exponent = static_cast<std::uint16_t>(120 + ((bits >> 7) & 15));
      out[j] = static_cast<std::uint16_t>((bits & 0x807f) | (exponent << 7));
    }
  }
}

// Any bits for rows that are only copied; for the cast: finite, also tiny, huge and zero blocks.
void fill_x(const Case& c, Random& random, std::vector<std::uint16_t>& x) {
  if (!c.fp8) {
    for (std::size_t i = 0; i < x.size(); i += 4) {
      const std::uint64_t bits = random.next();
      std::memcpy(&x[i], &bits, 8);  // hidden is a multiple of 128
    }
    return;
  }
  fill_finite(random, x.data(), x.size());
  for (std::size_t block = 0; block < x.size(); block += 128) {
    const std::uint32_t kind = random.below(16);
    if (kind == 0) std::fill_n(&x[block], 128, std::uint16_t{0});
    if (kind == 1) x[block + random.below(128)] = 0x7f7f;  // the largest bf16
    if (kind == 2) std::fill_n(&x[block], 128, std::uint16_t{0x0001});
  }
}

std::uint32_t num_tokens_of(const Case& c, std::uint32_t rank, std::uint64_t round) {
  Random random(mixed(c.seed, 11, rank, round));
  switch (c.sizes) {
    case Sizes::kFull: return c.max_tokens;
    case Sizes::kUneven: return random.below(c.max_tokens + 1);
    case Sizes::kSomeEmpty: return random.below(2) == 0 ? 0 : 1 + random.below(c.max_tokens);
    case Sizes::kAllEmpty: return 0;
  }
  return 0;
}

std::int64_t choose_expert(const Case& c, Random& random, std::uint32_t k, std::int64_t previous) {
  const std::uint32_t experts = c.num_experts;
  switch (c.routing) {
    case Routing::kUniform: return random.below(20) == 0 ? -1 : std::int64_t{random.below(experts)};
    case Routing::kZipf: {
      const float u = random.unit();
      return static_cast<std::int64_t>(static_cast<float>(experts - 1) * u * u * u);
    }
    case Routing::kOneExpert: return experts - 1;
    case Routing::kOneRank: {
      const std::uint32_t per_rank = experts / c.num_ranks;
      return (c.num_ranks / 2) * per_rank + random.below(per_rank);
    }
    case Routing::kSparse: return random.below(4) == 0 ? std::int64_t{random.below(experts)} : -1;
    case Routing::kNothing: return -1;
    case Routing::kRepeated:
      return k > 0 && random.below(2) == 0 ? previous : std::int64_t{random.below(experts)};
  }
  return -1;
}

const char* routing_name(Routing routing) {
  switch (routing) {
    case Routing::kUniform: return "uniform";
    case Routing::kZipf: return "zipf";
    case Routing::kOneExpert: return "one expert";
    case Routing::kOneRank: return "one rank";
    case Routing::kSparse: return "sparse";
    case Routing::kNothing: return "nothing";
    case Routing::kRepeated: return "repeated";
  }
  return "?";
}

const char* sizes_name(Sizes sizes) {
  switch (sizes) {
    case Sizes::kFull: return "full";
    case Sizes::kUneven: return "uneven";
    case Sizes::kSomeEmpty: return "some empty";
    case Sizes::kAllEmpty: return "all empty";
  }
  return "?";
}

std::size_t row_bytes(const Case& c) {
  return std::size_t{c.hidden} * (c.fp8 ? 1 : 2);
}

std::int64_t index_at(const Case& c, const void* indices, std::size_t i) {
  return c.index64 ? static_cast<const std::int64_t*>(indices)[i]
                   : static_cast<const std::int32_t*>(indices)[i];
}

// "" or where two arrays of n elements differ, bit by bit.
template <typename T>
std::string differ(const char* name, const T* got, const T* wanted, std::size_t n) {
  // As bytes: bits count, also those of NaN and of the sign of zero.
  const auto* got_bytes = reinterpret_cast<const std::byte*>(got);
  const auto* wanted_bytes = reinterpret_cast<const std::byte*>(wanted);
  const auto* different = std::mismatch(got_bytes, got_bytes + n * sizeof(T), wanted_bytes).first;
  const std::size_t i = static_cast<std::size_t>(different - got_bytes) / sizeof(T);
  if (i == n) return "";
  return std::string(name) + "[" + std::to_string(i) + "] of " + std::to_string(n) + " is " +
         std::to_string(got[i]) + ", not " + std::to_string(wanted[i]);
}

std::uint64_t digest(std::uint64_t hash, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3ull;
  return hash;
}

}  // namespace

std::string Case::describe() const {
  return "seed " + std::to_string(seed) + ": R=" + std::to_string(num_ranks) +
         " E=" + std::to_string(num_experts) + " T=" + std::to_string(max_tokens) +
         " H=" + std::to_string(hidden) + " K=" + std::to_string(topk) + " depth=" + std::to_string(depth) +
         (fp8 ? " fp8" : " bf16") + (index64 ? " int64" : " int32") + (send_weights ? " weights" : "") +
         (weighted ? " weighted" : "") + ", routing " + routing_name(routing) + ", sizes " +
         sizes_name(sizes);
}

kernels::reference::GroupParams Case::params() const {
  kernels::reference::GroupParams p;
  p.num_ranks = num_ranks;
  p.num_experts = num_experts;
  p.hidden = hidden;
  p.topk = topk;
  p.fp8 = fp8;
  return p;
}

epd_group_config_t Case::config(const char* name, std::uint32_t rank) const {
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  config.name = name;
  config.rank = static_cast<std::int32_t>(rank);
  config.num_ranks = num_ranks;
  config.num_experts = num_experts;
  config.max_tokens = max_tokens;
  config.hidden = hidden;
  config.topk = topk;
  config.depth = depth;
  config.payload = fp8 ? EPD_PAYLOAD_FP8_CAST : EPD_PAYLOAD_BF16;
  config.index_type = index64 ? EPD_INDEX_INT64 : EPD_INDEX_INT32;
  config.policy = degrade ? EPD_DEGRADE : EPD_FAIL_FAST;
  config.timeout_ms = 30000;
  return config;
}

Case random_case(std::uint64_t seed, std::uint32_t num_ranks) {
  Random random(mixed(seed, 77, num_ranks, 0));
  constexpr std::uint32_t kHidden[] = {128, 128, 256, 384, 512, 1024, 2048, 7168};
  constexpr std::uint32_t kTopk[] = {1, 2, 3, 4, 6, 8, 13, 32};
  Case c;
  c.seed = seed;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * (1 + random.below(random.below(3) == 0 ? 32 : 4));
  c.hidden = kHidden[random.below(8)];
  c.topk = kTopk[random.below(8)];
  const std::uint32_t most = std::max(1u, std::min(64u, (1u << 18) / (c.hidden * num_ranks)));
  c.max_tokens = 1 + random.below(most);
  c.depth = 1 + random.below(4);
  c.fp8 = random.below(2) == 0;
  c.index64 = random.below(2) == 0;
  c.send_weights = random.below(4) != 0;
  c.weighted = random.below(2) == 0;
  constexpr Routing kRouting[] = {Routing::kUniform,   Routing::kUniform, Routing::kZipf,
                                  Routing::kOneExpert, Routing::kOneRank, Routing::kSparse,
                                  Routing::kNothing,   Routing::kRepeated};
  c.routing = kRouting[random.below(8)];
  constexpr Sizes kSizes[] = {Sizes::kFull, Sizes::kUneven, Sizes::kUneven, Sizes::kSomeEmpty};
  c.sizes = random.below(16) == 0 ? Sizes::kAllEmpty : kSizes[random.below(4)];
  return c;
}

Input make_input(const Case& c, std::uint32_t rank, std::uint64_t round) {
  Random random(mixed(c.seed, 22, rank, round));
  Input input;
  input.num_tokens = num_tokens_of(c, rank, round);
  input.x.resize(std::size_t{input.num_tokens} * c.hidden);
  fill_x(c, random, input.x);
  const std::size_t choices = std::size_t{input.num_tokens} * c.topk;
  input.topk_idx.resize(choices);
  input.topk_weights.resize(choices);
  for (std::size_t i = 0; i < choices; ++i) {
    input.topk_idx[i] =
        choose_expert(c, random, static_cast<std::uint32_t>(i % c.topk), i == 0 ? 0 : input.topk_idx[i - 1]);
    input.topk_weights[i] = random.unit() - 0.125f;
  }
  return input;
}

std::vector<Input> make_inputs(const Case& c, std::uint64_t round) {
  std::vector<Input> inputs;
  inputs.reserve(c.num_ranks);
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) inputs.push_back(make_input(c, rank, round));
  return inputs;
}

void make_y_row(const Case& c, std::uint32_t rank, std::uint64_t round, std::uint32_t row, std::uint16_t* y) {
  Random random(mixed(c.seed, 33 + rank, round, row));
  fill_finite(random, y, c.hidden);
}

void fill_dispatch(const Case& c, const epd_buffers_t& b, const Input& input) {
  if (!input.x.empty()) std::memcpy(b.x, input.x.data(), input.x.size() * 2);
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    if (c.index64) {
      static_cast<std::int64_t*>(b.topk_idx)[i] = input.topk_idx[i];
    } else {
      static_cast<std::int32_t*>(b.topk_idx)[i] = static_cast<std::int32_t>(input.topk_idx[i]);
    }
    b.topk_weights[i] = input.topk_weights[i];
  }
  const std::size_t rows = std::size_t{c.num_ranks} * c.max_tokens;
  std::memset(b.recv_x, kPoison, rows * row_bytes(c));
  if (c.fp8) std::memset(b.recv_scales, kPoison, rows * (c.hidden / 128) * 4);
  std::memset(b.recv_topk_idx, kPoison, rows * c.topk * (c.index64 ? 8 : 4));
  std::memset(b.recv_topk_weights, kPoison, rows * c.topk * 4);
  std::memset(b.recv_src, kPoison, rows * 8);
  std::memset(b.rank_offsets, kPoison, (std::size_t{c.num_ranks} + 1) * 4);
  std::memset(b.expert_counts, kPoison, std::size_t{c.num_experts / c.num_ranks} * 4);
}

void fill_combine(const Case& c, const epd_buffers_t& b, std::uint32_t rank, std::uint64_t round,
                  std::uint32_t num_rows) {
  auto* y = static_cast<std::uint16_t*>(b.y);
  for (std::uint32_t row = 0; row < num_rows; ++row)
    make_y_row(c, rank, round, row, y + std::size_t{row} * c.hidden);
  std::memset(b.out, kPoison, std::size_t{c.max_tokens} * c.hidden * 2);
}

std::string check_dispatch(const Case& c, const epd_buffers_t& b, const std::vector<Input>& inputs,
                           std::uint32_t rank, const epd_result_t& result, const epd_counts_t* counts) {
  std::vector<Input> sent = inputs;
  if (!c.send_weights) {
    for (Input& input : sent) input.topk_weights.clear();
  }
  const auto want = kernels::reference::dispatch_to(c.params(), sent, rank);
  if (result.num_recv_rows != want.num_rows) {
    return "num_recv_rows is " + std::to_string(result.num_recv_rows) + ", not " +
           std::to_string(want.num_rows);
  }
  std::string text = differ("rank_offsets", b.rank_offsets, want.rank_offsets.data(), c.num_ranks + 1);
  if (text.empty()) {
    text = differ("expert_counts", b.expert_counts, want.expert_counts.data(), c.num_experts / c.num_ranks);
  }
  if (text.empty() && counts != nullptr) {
    if (counts->num_recv_rows != want.num_rows) {
      return "counts.num_recv_rows is " + std::to_string(counts->num_recv_rows) + ", not " +
             std::to_string(want.num_rows);
    }
    text = differ("counts.rank_offsets", counts->rank_offsets, want.rank_offsets.data(), c.num_ranks + 1);
    if (text.empty()) {
      text = differ("counts.expert_counts", counts->expert_counts, want.expert_counts.data(),
                    c.num_experts / c.num_ranks);
    }
  }
  const std::size_t rows = want.num_rows;
  if (text.empty()) text = differ("recv_src", b.recv_src, want.recv_src.data(), rows * 2);
  if (text.empty()) {
    text = c.fp8 ? differ("recv_x (e4m3)", static_cast<const std::uint8_t*>(b.recv_x), want.recv_e4m3.data(),
                          rows * c.hidden)
                 : differ("recv_x (bf16)", static_cast<const std::uint16_t*>(b.recv_x), want.recv_bf16.data(),
                          rows * c.hidden);
  }
  if (text.empty() && c.fp8) {
    text = differ("recv_scales", b.recv_scales, want.recv_scales.data(), rows * (c.hidden / 128));
  }
  for (std::size_t i = 0; i < rows * c.topk && text.empty(); ++i) {
    const std::int64_t got = index_at(c, b.recv_topk_idx, i);
    text = differ(("recv_topk_idx element " + std::to_string(i)).c_str(), &got, &want.recv_topk_idx[i], 1);
  }
  if (text.empty()) {
    text = differ("recv_topk_weights", b.recv_topk_weights, want.recv_topk_weights.data(), rows * c.topk);
  }
  return text;
}

std::string check_combine(const Case& c, const epd_buffers_t& b, const std::vector<Input>& inputs,
                          std::uint32_t rank, std::uint64_t round, const std::set<std::uint32_t>& silent) {
  std::vector<std::vector<std::uint16_t>> y(c.num_ranks);
  const std::uint32_t per_rank = c.num_experts / c.num_ranks;
  for (std::uint32_t d = 0; d < c.num_ranks; ++d) {
    std::uint32_t rows = 0;
    for (const Input& input : inputs) {
      for (std::size_t token = 0; token < input.num_tokens; ++token) {
        const auto first = input.topk_idx.begin() + static_cast<std::ptrdiff_t>(token * c.topk);
        rows +=
            std::any_of(first, first + c.topk, [&](std::int64_t e) { return e >= 0 && e / per_rank == d; })
                ? 1
                : 0;
      }
    }
    y[d].resize(std::size_t{rows} * c.hidden);
    for (std::uint32_t row = 0; row < rows && !silent.contains(d); ++row)
      make_y_row(c, d, round, row, &y[d][std::size_t{row} * c.hidden]);
  }
  const auto want = kernels::reference::combine_to(c.params(), inputs, y, c.weighted, rank);
  return differ("out", static_cast<const std::uint16_t*>(b.out), want.data(), want.size());
}

std::vector<Input> without_ranks(const Case& c, std::vector<Input> inputs,
                                 const std::set<std::uint32_t>& lost) {
  for (const std::uint32_t rank : lost) inputs[rank] = {};
  const std::uint32_t per_rank = c.num_experts / c.num_ranks;
  for (Input& input : inputs) {
    for (std::int64_t& choice : input.topk_idx) {
      if (choice >= 0 && lost.contains(static_cast<std::uint32_t>(choice) / per_rank)) choice = -1;
    }
  }
  return inputs;
}

std::uint32_t selections_of(const Case& c, const Input& input, const std::set<std::uint32_t>& ranks) {
  const std::uint32_t per_rank = c.num_experts / c.num_ranks;
  return static_cast<std::uint32_t>(
      std::count_if(input.topk_idx.begin(), input.topk_idx.end(), [&](std::int64_t choice) {
        return choice >= 0 && ranks.contains(static_cast<std::uint32_t>(choice) / per_rank);
      }));
}

std::uint64_t digest_dispatch(const Case& c, const epd_buffers_t& b, std::uint32_t num_rows) {
  std::uint64_t hash = digest(0xcbf29ce484222325ull, b.recv_x, num_rows * row_bytes(c));
  if (c.fp8) hash = digest(hash, b.recv_scales, std::size_t{num_rows} * (c.hidden / 128) * 4);
  hash = digest(hash, b.recv_topk_idx, std::size_t{num_rows} * c.topk * (c.index64 ? 8 : 4));
  hash = digest(hash, b.recv_topk_weights, std::size_t{num_rows} * c.topk * 4);
  hash = digest(hash, b.recv_src, std::size_t{num_rows} * 8);
  hash = digest(hash, b.rank_offsets, (std::size_t{c.num_ranks} + 1) * 4);
  return digest(hash, b.expert_counts, std::size_t{c.num_experts / c.num_ranks} * 4);
}

std::uint64_t digest_combine(const Case& c, const epd_buffers_t& b, std::uint32_t num_tokens) {
  return digest(0xcbf29ce484222325ull, b.out, std::size_t{num_tokens} * c.hidden * 2);
}

}  // namespace epd::test
