#include "support/cases.h"

#include "kit/config_shape.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace epd::test {
namespace {

bool all_span = false;

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

std::vector<std::uint8_t> any_bytes(Random& random, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t bits = random.next();
    std::memcpy(&bytes[i], &bits, std::min<std::size_t>(8, count - i));
  }
  return bytes;
}

// Any bits for rows that are only copied; for the cast: finite, also tiny, huge and zero blocks.
std::vector<std::uint8_t> make_x(const Case& c, Random& random, std::size_t tokens) {
  const abi::GroupShape shape = c.row_shape();
  if (shape.payload != abi::Payload::kFp8Cast) return any_bytes(random, tokens * shape.x_bytes());
  std::vector<std::uint16_t> x(tokens * c.hidden);
  fill_finite(random, x.data(), x.size());
  for (std::size_t block = 0; block < x.size(); block += 128) {
    const auto width = static_cast<std::uint32_t>(std::min<std::size_t>(128, x.size() - block));
    const std::uint32_t kind = random.below(16);
    if (kind == 0) std::fill_n(&x[block], width, std::uint16_t{0});
    if (kind == 1) x[block + random.below(width)] = 0x7f7f;  // the largest bf16
    if (kind == 2) std::fill_n(&x[block], width, std::uint16_t{0x0001});
  }
  std::vector<std::uint8_t> bytes(x.size() * 2);
  if (!x.empty()) std::memcpy(bytes.data(), x.data(), bytes.size());
  return bytes;
}

std::uint32_t num_tokens_of(const Case& c, std::uint32_t rank, std::uint64_t routing) {
  Random random(mixed(c.seed, 11, rank, routing));
  switch (c.sizes) {
    case Sizes::kFull: return c.max_tokens;
    case Sizes::kUneven: return random.below(c.max_tokens + 1);
    case Sizes::kSomeEmpty: return random.below(2) == 0 ? 0 : 1 + random.below(c.max_tokens);
    case Sizes::kAllEmpty: return 0;
  }
  return 0;
}

// Every negative number is no selection.
std::int64_t no_selection(const Case& c, Random& random) {
  const std::int64_t values[] = {-1, -2, INT32_MIN, c.index64 ? INT64_MIN : -3};
  return values[random.below(4)];
}

std::int64_t choose_expert(const Case& c, Random& random, std::uint32_t k, std::int64_t previous) {
  const std::uint32_t experts = c.num_experts;
  switch (c.routing) {
    case Routing::kUniform:
      return random.below(20) == 0 ? no_selection(c, random) : std::int64_t{random.below(experts)};
    case Routing::kZipf: {
      const float u = random.unit();
      return static_cast<std::int64_t>(static_cast<float>(experts - 1) * u * u * u);
    }
    case Routing::kOneExpert: return experts - 1;
    case Routing::kOneRank: {
      const std::uint32_t per_rank = experts / c.num_ranks;
      return (c.num_ranks / 2) * per_rank + random.below(per_rank);
    }
    case Routing::kSparse:
      return random.below(4) == 0 ? std::int64_t{random.below(experts)} : no_selection(c, random);
    case Routing::kNothing: return -1;
    case Routing::kRepeated:
      return k > 0 && random.below(2) == 0 ? previous : std::int64_t{random.below(experts)};
  }
  return -1;
}

std::vector<std::int64_t> make_choices(const Case& c, std::uint32_t rank, std::uint64_t routing) {
  Random random(mixed(c.seed, 23, rank, routing));
  std::vector<std::int64_t> choices(std::size_t{num_tokens_of(c, rank, routing)} * c.topk);
  for (std::size_t i = 0; i < choices.size(); ++i) {
    choices[i] =
        choose_expert(c, random, static_cast<std::uint32_t>(i % c.topk), i == 0 ? 0 : choices[i - 1]);
  }
  return choices;
}

// The rank of left_out_rows; kNone: no rank in this round.
constexpr std::uint32_t kNone = 0xffffffff;
std::uint32_t left_out_rank(const Case& c, Round round) {
  Random random(mixed(c.seed, 27, 0, round.data));
  return c.left_out_rows && random.below(3) == 0 ? random.below(c.num_ranks) : kNone;
}

// Some are zeros, of either sign.
std::vector<float> make_weights(const Case& c, std::uint32_t rank, Round round) {
  Random random(mixed(c.seed, 24, rank, round.data));
  const std::vector<std::int64_t> choices = make_choices(c, rank, round.routing);
  const std::int64_t per_rank = c.num_experts / c.num_ranks;
  const std::uint32_t left_out = left_out_rank(c, round);
  std::vector<float> weights(choices.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = random.unit() - 0.125f;
    if (random.below(8) == 0 || (choices[i] >= 0 && choices[i] / per_rank == left_out))
      weights[i] = std::copysign(0.0f, weights[i]);
  }
  return weights;
}

std::vector<float> make_y_weights(const Case& c, std::uint32_t rank, Round round, std::size_t rows) {
  Random random(mixed(c.seed, 25, rank, round.data));
  std::vector<float> weights(rows * c.shape().choices_per_row());
  for (float& weight : weights) weight = random.unit() - 0.5f;
  return weights;
}

std::vector<std::uint16_t> make_bias(const Case& c, std::uint32_t rank, Round round, std::uint32_t which) {
  Random random(mixed(c.seed, 26 + which, rank, round.data));
  std::vector<std::uint16_t> bias(std::size_t{num_tokens_of(c, rank, round.routing)} * c.hidden);
  fill_finite(random, bias.data(), bias.size());
  return bias;
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

const char* layout_name(epd_layout_t layout) {
  switch (layout) {
    case EPD_LAYOUT_COMPACT: return " compact";
    case EPD_LAYOUT_PACKED: return " packed";
    case EPD_LAYOUT_EXPERT: return " expert";
  }
  return " ?";
}

std::string format_name(const Case& c, epd_row_format_t format) {
  const char* const scales[] = {"", " pow2", " ue8m0"};
  switch (format.payload) {
    case EPD_PAYLOAD_BF16: return " bf16";
    case EPD_PAYLOAD_FP8_CAST: return std::string(" fp8 cast") + scales[format.scale_format];
    case EPD_PAYLOAD_FP8: return std::string(" fp8") + scales[format.scale_format];
    case EPD_PAYLOAD_OPAQUE: return " opaque " + std::to_string(c.opaque_bytes);
  }
  return " ?";
}

std::string format_names(const Case& c) {
  std::string names = format_name(c, {c.payload, c.scales});
  for (const epd_row_format_t& more : c.more_formats) names += " or" + format_name(c, more);
  return names;
}

// The same group as far as places are concerned, with rows of no weight.
Case slim_case(Case c) {
  c.payload = EPD_PAYLOAD_OPAQUE;
  c.scales = EPD_SCALE_FORMAT_FLOAT32;
  c.more_formats.clear();
  c.row_format = 0;
  c.opaque_bytes = abi::kOpaqueMultiple;
  return c;
}

// Inputs with rows of no weight: who receives what is all that they say.
std::vector<Input> slim_inputs(const Case& c, std::uint64_t routing) {
  std::vector<Input> inputs(c.num_ranks);
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    inputs[rank].num_tokens = num_tokens_of(c, rank, routing);
    inputs[rank].topk_idx = make_choices(c, rank, routing);
    inputs[rank].x.resize(std::size_t{inputs[rank].num_tokens} * abi::kOpaqueMultiple);
  }
  return inputs;
}

}  // namespace

std::string Case::describe() const {
  return "seed " + std::to_string(seed) + ": R=" + std::to_string(num_ranks) +
         " E=" + std::to_string(num_experts) + " T=" + std::to_string(max_tokens) +
         " H=" + std::to_string(hidden) + " K=" + std::to_string(topk) + " depth=" + std::to_string(depth) +
         layout_name(layout) + format_names(*this) +
         (scale_layout != EPD_SCALE_LAYOUT_ROW_MAJOR ? " scale columns" : "") +
         (range_format != EPD_RANGE_FORMAT_ROWS ? " packed ranges" : "") + (index64 ? " int64" : " int32") +
         (alignment != 1 ? " alignment " + std::to_string(alignment) : "") +
         (max_recv_rows != 0 ? " room for " + std::to_string(max_recv_rows) : "") +
         (sum_ranks != 0 ? " sum_ranks " + std::to_string(sum_ranks) : "") +
         (num_biases != 0 ? " biases " + std::to_string(num_biases) : "") + (send_weights ? " weights" : "") +
         (weighted ? " weighted" : "") +
         (return_weights != abi::kReturnNone ? " return_weights " + std::to_string(return_weights) : "") +
         (zero_padding ? " zero_padding" : "") + (mark_unused ? " mark_unused" : "") +
         (defer ? " defer" : "") + (in_streams != 0 ? " in streams " + std::to_string(in_streams) : "") +
         (kernel_waits != 0 ? " kernel waits " + std::to_string(kernel_waits) : "") +
         (event_waits != 0 ? " event waits " + std::to_string(event_waits) : "") +
         (sms != 0 ? " sms " + std::to_string(sms) : "") + ", routing " + routing_name(routing) + ", sizes " +
         sizes_name(sizes);
}

abi::GroupShape Case::shape() const {
  return shape_of(config("", 0));
}

// A graph has one row format for each of its dispatches, whose replays are multiples of 6 rounds apart.
Case Case::at(const Round& round) const {
  Case at = *this;
  at.row_format = static_cast<std::uint32_t>(mixed(seed, 44, round.data % 6, 0) % (more_formats.size() + 1));
  return at;
}

kernels::reference::GroupParams Case::params() const {
  kernels::reference::GroupParams params = params_of(config("", 0));
  const abi::GroupShape of = row_shape();
  params.payload = static_cast<kernels::reference::Payload>(of.payload);
  params.scale_format = of.scale_format;
  return params;
}

void let_groups_span_nodes(bool span) {
  all_span = span;
}

epd_group_config_t Case::config(const char* name, std::uint32_t rank) const {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.rank = static_cast<std::int32_t>(rank);
  config.num_ranks = num_ranks;
  config.num_experts = num_experts;
  config.max_tokens = max_tokens;
  config.hidden = hidden;
  config.topk = topk;
  config.depth = depth;
  config.payload = payload;
  config.index_type = index64 ? EPD_INDEX_TYPE_INT64 : EPD_INDEX_TYPE_INT32;
  config.policy = !degrade ? EPD_POLICY_FAIL_FAST : late ? EPD_POLICY_DEGRADE_LATE : EPD_POLICY_DEGRADE;
  config.timeout_ms = 30000;
  config.layout = layout;
  config.scale_format = scales;
  config.more_formats = more_formats.data();
  config.num_more_formats = static_cast<std::uint32_t>(more_formats.size());
  // Tests change layouts and payloads of cases that chance has made.
  if (shape_of(config).has_scales()) config.scale_layout = scale_layout;
  if (layout != EPD_LAYOUT_COMPACT) config.range_format = range_format;
  config.expert_alignment = alignment;
  config.opaque_bytes = opaque_bytes;
  config.num_biases = num_biases;
  config.num_handles = num_handles;
  config.max_recv_rows = max_recv_rows;
  config.priority = priority;
  config.sum_ranks = sum_ranks;
  config.span = all_span ? EPD_SPAN_CLUSTER : span;
  if (config.span == EPD_SPAN_CLUSTER && sum_ranks == 0) config.sum_ranks = num_ranks;
  return config;
}

std::uint32_t rows_needed(const Case& c, std::uint64_t num_routings) {
  Case roomy = slim_case(c);
  roomy.max_recv_rows = 0;
  std::uint32_t needed = 1;
  for (std::uint64_t routing = 0; routing < num_routings; ++routing) {
    for (const auto& received : kernels::reference::dispatch(roomy.params(), slim_inputs(c, routing))) {
      if (c.layout != EPD_LAYOUT_EXPERT) {
        needed = std::max(needed, received.num_rows);
      } else {
        for (const std::int32_t count : received.expert_counts)
          needed = std::max(needed, static_cast<std::uint32_t>(count));
      }
    }
  }
  return needed;
}

Case random_case(std::uint64_t seed, std::uint32_t num_ranks) {
  Random random(mixed(seed, 77, num_ranks, 0));
  constexpr std::uint32_t kHidden[] = {8, 128, 136, 264, 512, 1000, 2880, 7168};
  constexpr std::uint32_t kTopk[] = {1, 2, 3, 4, 6, 8, 13, 32};
  Case c;
  c.seed = seed;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * (1 + random.below(random.below(3) == 0 ? 32 : 4));
  c.hidden = kHidden[random.below(8)];
  c.topk = kTopk[random.below(8)];
  constexpr epd_layout_t kLayouts[] = {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT};
  c.layout = kLayouts[random.below(3)];
  constexpr std::uint32_t kAlignments[] = {1, 1, 4, 16, 3, 128};
  c.alignment = kAlignments[random.below(6)];
  // Elements of recv_x per token of T.
  const std::uint32_t per_rank = c.num_experts / num_ranks;
  const std::uint32_t copies = c.layout == EPD_LAYOUT_COMPACT  ? 1
                               : c.layout == EPD_LAYOUT_PACKED ? std::min(c.topk, per_rank)
                                                               : per_rank;
  const std::uint32_t most = std::max(1u, std::min(64u, (1u << 18) / (c.hidden * num_ranks * copies)));
  c.max_tokens = 1 + random.below(most);
  c.depth = 1 + random.below(4);
  constexpr epd_payload_t kPayloads[] = {EPD_PAYLOAD_BF16, EPD_PAYLOAD_FP8_CAST, EPD_PAYLOAD_FP8_CAST,
                                         EPD_PAYLOAD_FP8, EPD_PAYLOAD_OPAQUE};
  c.payload = kPayloads[random.below(5)];
  if (c.payload == EPD_PAYLOAD_OPAQUE) c.opaque_bytes = 16 * (1 + random.below(64));
  if (c.payload == EPD_PAYLOAD_FP8_CAST) c.scales = static_cast<epd_scale_format_t>(random.below(3));
  if (c.payload == EPD_PAYLOAD_FP8 && random.below(2) == 0) c.scales = EPD_SCALE_FORMAT_UE8M0;
  c.num_biases = random.below(3);
  c.return_weights = static_cast<abi::ReturnWeights>(random.below(3));
  c.zero_padding = random.below(2) == 0;
  c.mark_unused = random.below(3) == 0;
  c.defer = random.below(3) == 0;
  c.sms = random.below(3);
  c.index64 = random.below(2) == 0;
  c.send_weights = random.below(4) != 0;
  c.weighted = random.below(2) == 0;
  c.left_out_rows = c.weighted;
  constexpr Routing kRouting[] = {Routing::kUniform,   Routing::kUniform, Routing::kZipf,
                                  Routing::kOneExpert, Routing::kOneRank, Routing::kSparse,
                                  Routing::kNothing,   Routing::kRepeated};
  c.routing = kRouting[random.below(8)];
  constexpr Sizes kSizes[] = {Sizes::kFull, Sizes::kUneven, Sizes::kUneven, Sizes::kSomeEmpty};
  c.sizes = random.below(16) == 0 ? Sizes::kAllEmpty : kSizes[random.below(4)];
  if (random.below(3) == 0) c.max_recv_rows = rows_needed(c, kRoundsThatFit);
  if (random.below(2) == 0) c.sum_ranks = 1 + random.below(num_ranks);
  if (c.payload == EPD_PAYLOAD_FP8_CAST || c.payload == EPD_PAYLOAD_FP8)
    c.scale_layout = static_cast<epd_scale_layout_t>(random.below(2));
  if (c.layout != EPD_LAYOUT_COMPACT) c.range_format = static_cast<epd_range_format_t>(random.below(2));
  return c;
}

void add_formats(Case& c) {
  if (c.payload == EPD_PAYLOAD_OPAQUE) return;
  const std::vector<epd_row_format_t> all{
      {EPD_PAYLOAD_BF16, EPD_SCALE_FORMAT_FLOAT32},          {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32},
      {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32_POW2}, {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_UE8M0},
      {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_FLOAT32},           {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_UE8M0}};
  Random random(mixed(c.seed, 45, 0, 0));
  const std::uint32_t wanted = random.below(EPD_MAX_MORE_FORMATS + 1);
  for (std::uint32_t i = 0, at = random.below(6); i < 6 && c.more_formats.size() < wanted; ++i) {
    const epd_row_format_t& next = all[(at + 5 * i) % 6];
    if (next.payload != c.payload || next.scale_format != c.scales) c.more_formats.push_back(next);
  }
  if (c.shape().has_scales()) c.scale_layout = static_cast<epd_scale_layout_t>(random.below(2));
}

Input make_input(const Case& of_group, std::uint32_t rank, Round round) {
  const Case c = of_group.at(round);
  Random random(mixed(c.seed, 22, rank, round.data));
  const abi::GroupShape shape = c.row_shape();
  Input input;
  input.num_tokens = num_tokens_of(c, rank, round.routing);
  input.x = make_x(c, random, input.num_tokens);
  if (shape.payload == abi::Payload::kFp8)
    input.x_scales = any_bytes(random, std::size_t{input.num_tokens} * shape.scale_bytes());
  input.topk_idx = make_choices(c, rank, round.routing);
  input.topk_weights = make_weights(c, rank, round);
  return input;
}

std::vector<Input> make_inputs(const Case& c, Round round) {
  std::vector<Input> inputs;
  inputs.reserve(c.num_ranks);
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) inputs.push_back(make_input(c, rank, round));
  return inputs;
}

void make_y_row(const Case& c, std::uint32_t rank, Round round, std::uint32_t row, std::uint16_t* y) {
  if (rank == left_out_rank(c, round)) {
    std::fill_n(y, c.hidden, std::uint16_t{0x7fc0});
    return;
  }
  Random random(mixed(c.seed, 33 + rank, round.data, row));
  fill_finite(random, y, c.hidden);
}

std::uint32_t biases_of(const Case& c, Round round) {
  return static_cast<std::uint32_t>((round.data + 1) % (c.num_biases + 1));
}

epd_dispatch_args_t dispatch_args(const Case& c, std::uint32_t num_tokens) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.num_tokens = num_tokens;
  args.row_format = c.row_format;
  args.omit_weights = c.send_weights ? 0 : 1;
  args.defer_receive = c.defer ? 1 : 0;
  args.zero_padding = c.zero_padding ? 1 : 0;
  args.mark_unused = c.mark_unused ? 1 : 0;
  args.sms = c.sms;
  return args;
}

epd_combine_args_t combine_args(const Case& c, Round round) {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.weighted = c.weighted ? 1 : 0;
  args.num_biases = biases_of(c, round);
  args.return_weights = static_cast<epd_return_weights_t>(c.return_weights);
  args.defer_receive = c.defer ? 1 : 0;
  args.sms = c.sms;
  return args;
}

void fill_dispatch(const Case& c, const epd_buffers_t& b, const Input& input, bool cached) {
  const auto copy = [](void* to, const auto& from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(from[0]));
  };
  copy(b.x, input.x);
  copy(b.x_scales, input.x_scales);
  copy(b.topk_weights, input.topk_weights);
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    const std::int64_t choice = cached ? std::int64_t{c.num_experts} + 7 : input.topk_idx[i];
    if (c.index64) {
      static_cast<std::int64_t*>(b.topk_idx)[i] = choice;
    } else {
      static_cast<std::int32_t*>(b.topk_idx)[i] = static_cast<std::int32_t>(choice);
    }
  }
  const abi::GroupShape shape = c.shape();
  const auto poison = [&](void* region, abi::Region which) {
    if (region != nullptr) std::memset(region, kPoison, abi::region_bytes(shape, which));
  };
  poison(b.recv_x, abi::Region::kRecvX);
  poison(b.recv_scales, abi::Region::kRecvScales);
  poison(b.recv_topk_idx, abi::Region::kRecvTopkIdx);
  poison(b.recv_topk_weights, abi::Region::kRecvTopkWeights);
  poison(b.recv_src, abi::Region::kRecvSrc);
  poison(b.rank_offsets, abi::Region::kRankOffsets);
  poison(b.expert_counts, abi::Region::kExpertCounts);
  poison(b.expert_offsets, abi::Region::kExpertOffsets);
  poison(b.source_ranges, abi::Region::kSourceRanges);
}

void fill_combine(const Case& c, const epd_buffers_t& b, std::uint32_t rank, Round round,
                  std::uint32_t num_recv_rows) {
  const abi::GroupShape shape = c.shape();
  const std::size_t rows = c.layout == EPD_LAYOUT_EXPERT ? shape.recv_rows() : num_recv_rows;
  auto* y = static_cast<std::uint16_t*>(b.y);
  for (std::uint32_t row = 0; row < rows; ++row)
    make_y_row(c, rank, round, row, y + std::size_t{row} * c.hidden);
  const std::vector<float> weights = make_weights(c, rank, round);
  std::copy(weights.begin(), weights.end(), b.topk_weights);
  const std::vector<float> y_weights = make_y_weights(c, rank, round, rows);
  std::copy(y_weights.begin(), y_weights.end(), b.y_weights);
  for (std::uint32_t i = 0; i < c.num_biases; ++i) {
    const std::vector<std::uint16_t> bias = make_bias(c, rank, round, i);
    std::copy(bias.begin(), bias.end(), static_cast<std::uint16_t*>(b.bias[i]));
  }
  std::memset(b.out, kPoison, abi::region_bytes(shape, abi::Region::kOut));
  std::memset(b.out_weights, kPoison, abi::region_bytes(shape, abi::Region::kOutWeights));
}

std::vector<Answer> make_answers(const Case& c, Round round, const std::vector<Input>& dispatched,
                                 const std::set<std::uint32_t>& silent) {
  const Case slim = slim_case(c);
  std::vector<Input> inputs(c.num_ranks);
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    inputs[rank].num_tokens = dispatched[rank].num_tokens;
    inputs[rank].topk_idx = dispatched[rank].topk_idx;
    inputs[rank].x.resize(std::size_t{inputs[rank].num_tokens} * abi::kOpaqueMultiple);
  }
  std::vector<Answer> answers(c.num_ranks);
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    const std::uint32_t rows = kernels::reference::dispatch_to(slim.params(), inputs, rank).num_rows;
    Answer& answer = answers[rank];
    answer.y.resize(std::size_t{rows} * c.hidden);
    answer.y_weights = make_y_weights(c, rank, round, rows);
    if (silent.contains(rank)) std::fill(answer.y_weights.begin(), answer.y_weights.end(), 0.0f);
    for (std::uint32_t row = 0; row < rows && !silent.contains(rank); ++row)
      make_y_row(c, rank, round, row, &answer.y[std::size_t{row} * c.hidden]);
    for (std::uint32_t i = 0; i < biases_of(c, round); ++i) answer.bias[i] = make_bias(c, rank, round, i);
  }
  return answers;
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

}  // namespace epd::test
