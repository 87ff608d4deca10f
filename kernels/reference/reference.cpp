#include "kernels/reference.h"

#include "kernels/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

namespace epd::kernels::reference {
namespace {

// Returns the magnitude of an e4m3 code without sign: 0 1/512 2/512 ... 448, ascending with the code. 0x7f is
// NaN.
double e4m3_magnitude(int code) {
  const int exponent = code / 8;
  const int mantissa = code % 8;
  if (exponent == 0) return std::ldexp(mantissa, -9);
  return std::ldexp(8 + mantissa, exponent - 10);
}

std::array<double, 127> all_e4m3_magnitudes() {
  std::array<double, 127> magnitudes{};
  for (int code = 0; code < 127; ++code) magnitudes[code] = e4m3_magnitude(code);
  return magnitudes;
}

// Returns the nearest code, the even one of two equally near codes, and at most 448.
std::uint8_t nearest_e4m3(float value) {
  static const std::array<double, 127> magnitudes = all_e4m3_magnitudes();
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(static_cast<double>(value));
  int code = 126;
  if (magnitude < magnitudes[126]) {
    const auto above = std::upper_bound(magnitudes.begin(), magnitudes.end(), magnitude);
    code = static_cast<int>(above - magnitudes.begin()) - 1;
    const double down = magnitude - magnitudes[code];
    const double up = magnitudes[code + 1] - magnitude;
    if (up < down || (up == down && code % 2 == 1)) ++code;
  }
  return static_cast<std::uint8_t>(std::signbit(value) ? 0x80 | code : code);
}

// Returns the least power of two that is at least `scale`.
float power_of_two_above(float scale) {
  if (std::isinf(scale)) return scale;
  double power = 1;
  while (power > static_cast<double>(scale)) power /= 2;
  while (power < static_cast<double>(scale)) power *= 2;
  return static_cast<float>(power);
}

// A block has 128 values; the last one of a row may have fewer.
float cast_block(std::span<const std::uint16_t> x, ScaleFormat format, std::uint8_t* q) {
  float amax = 1e-30f;
  for (const std::uint16_t bits : x) {
    const float value = bf16_to_float(bits);
    if (!std::isnan(value)) amax = std::max(amax, std::fabs(value));
  }
  float scale = amax / 448.0f;
  float inverse = 448.0f / amax;
  if (format != ScaleFormat::kFloat32) {
    scale = power_of_two_above(scale);
    inverse = 1.0f / scale;
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float product = bf16_to_float(x[i]) * inverse;
    q[i] = nearest_e4m3(product);
  }
  return scale;
}

std::uint32_t experts_per_rank(const GroupParams& params) {
  return params.num_experts / params.num_ranks;
}

std::uint32_t choices_per_row(const GroupParams& params) {
  return params.layout == Layout::kCompact ? params.topk : 1;
}

bool is_masked(const GroupParams& params, std::uint32_t rank) {
  return !params.masked.empty() && params.masked[rank];
}

// Returns the token's k-th choice; -1 if there is none or its rank is inactive.
std::int64_t choice(const GroupParams& params, const RankInput& input, std::uint32_t token, std::uint32_t k) {
  const std::int64_t expert = input.topk_idx[std::size_t{token} * params.topk + k];
  if (expert < 0 || is_masked(params, static_cast<std::uint32_t>(expert / experts_per_rank(params))))
    return -1;
  return expert;
}

// A received row. A row for a rank carries the token's choices on that rank; a row for an expert carries the
// choices that name it.
struct Row {
  std::int32_t source = -1;  // -1: no token fills it
  std::int32_t token = -1;
  std::uint32_t rank = 0;    // where it is received
  std::int64_t expert = -1;  // of the group; -1 in layout compact
};

bool carries(const GroupParams& params, const Row& row, std::int64_t expert) {
  if (expert < 0) return false;
  return row.expert < 0 ? expert / experts_per_rank(params) == row.rank : expert == row.expert;
}

bool is_wanted(const GroupParams& params, const RankInput& input, const Row& row) {
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    if (carries(params, row, choice(params, input, static_cast<std::uint32_t>(row.token), k))) return true;
  }
  return false;
}

// Returns the rows that `expert` receives from all sources; if it is -1, the rows that the rank receives.
std::vector<Row> rows_of(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank,
                         std::int64_t expert) {
  std::vector<Row> rows;
  for (std::uint32_t source = 0; source < params.num_ranks; ++source) {
    if (is_masked(params, source)) continue;
    for (std::uint32_t token = 0; token < inputs[source].num_tokens; ++token) {
      const Row row = {static_cast<std::int32_t>(source), static_cast<std::int32_t>(token), rank, expert};
      if (is_wanted(params, inputs[source], row)) rows.push_back(row);
    }
  }
  return rows;
}

// Returns all rows of the rank's recv_x as they lie, including rows that no token fills. Also returns where
// experts begin.
std::vector<Row> rows_at(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank,
                         std::vector<std::int32_t>& expert_offsets) {
  expert_offsets.clear();
  if (params.layout == Layout::kCompact) return rows_of(params, inputs, rank, -1);
  std::vector<Row> rows;
  for (std::uint32_t i = 0; i < experts_per_rank(params); ++i) {
    expert_offsets.push_back(static_cast<std::int32_t>(rows.size()));
    const std::vector<Row> block = rows_of(params, inputs, rank, rank * experts_per_rank(params) + i);
    rows.insert(rows.end(), block.begin(), block.end());
    if (params.layout == Layout::kExpert) rows.resize(std::size_t{i + 1} * params.expert_capacity);
    while (params.layout == Layout::kPacked && rows.size() % params.alignment != 0) rows.emplace_back();
  }
  expert_offsets.push_back(static_cast<std::int32_t>(rows.size()));
  return rows;
}

// Returns the weight of the choices that the row carries, summed in order of k. NaN has one form.
float weight_of(const GroupParams& params, const RankInput& input, const Row& row) {
  float weight = 0.0f;
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    const auto token = static_cast<std::uint32_t>(row.token);
    if (carries(params, row, choice(params, input, token, k))) {
      weight = weight + input.topk_weights[std::size_t{token} * params.topk + k];
    }
  }
  return std::isnan(weight) ? std::numeric_limits<float>::quiet_NaN() : weight;
}

void append(std::vector<std::uint8_t>& bytes, const void* more, std::size_t count) {
  const auto* first = static_cast<const std::uint8_t*>(more);
  bytes.insert(bytes.end(), first, first + count);
}

void append_cast(const GroupParams& params, const std::uint8_t* x, RankReceived& received) {
  const std::size_t end = received.recv_scales.size() + scale_bytes(params);
  for (std::uint32_t start = 0; start < params.hidden; start += 128) {
    std::vector<std::uint16_t> block(std::min(128u, params.hidden - start));
    std::memcpy(block.data(), x + std::size_t{2} * start, block.size() * 2);
    std::uint8_t q[128];
    const float scale = cast_block(block, params.scale_format, q);
    append(received.recv_x, q, block.size());
    if (params.scale_format == ScaleFormat::kUe8m0) {
      received.recv_scales.push_back(std::isinf(scale) ? 255
                                                       : static_cast<std::uint8_t>(std::ilogb(scale) + 127));
    } else {
      append(received.recv_scales, &scale, sizeof(scale));
    }
  }
  received.recv_scales.resize(end, 0);
}

void append_values(const GroupParams& params, const RankInput& input, std::uint32_t token,
                   RankReceived& received) {
  const std::uint8_t* x = input.x.data() + std::size_t{token} * x_bytes(params);
  if (params.payload == Payload::kFp8Cast) {
    append_cast(params, x, received);
    return;
  }
  append(received.recv_x, x, row_bytes(params));
  if (params.payload == Payload::kFp8) {
    append(received.recv_scales, input.x_scales.data() + std::size_t{token} * scale_bytes(params),
           scale_bytes(params));
  }
}

void append_choices(const GroupParams& params, const RankInput& input, const Row& row,
                    RankReceived& received) {
  const std::int64_t first_expert = std::int64_t{row.rank} * experts_per_rank(params);
  const bool has_weights = !input.topk_weights.empty();
  if (row.expert >= 0) {
    received.recv_topk_idx.push_back(row.expert - first_expert);
    received.recv_topk_weights.push_back(has_weights ? weight_of(params, input, row) : 0.0f);
    return;
  }
  for (std::uint32_t k = 0; k < params.topk; ++k) {
    const auto token = static_cast<std::uint32_t>(row.token);
    const std::int64_t expert = choice(params, input, token, k);
    const bool here = carries(params, row, expert);
    received.recv_topk_idx.push_back(here ? expert - first_expert : -1);
    received.recv_topk_weights.push_back(
        here && has_weights ? input.topk_weights[std::size_t{token} * params.topk + k] : 0.0f);
  }
}

void append_unfilled(const GroupParams& params, RankReceived& received) {
  received.recv_x.resize(received.recv_x.size() + row_bytes(params));
  received.recv_scales.resize(received.recv_scales.size() + scale_bytes(params));
  received.recv_topk_idx.push_back(-1);
  received.recv_topk_weights.push_back(0.0f);
}

// Fills rank_offsets: how many tokens of each source have a row here.
void count_sources(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank,
                   RankReceived& received) {
  received.rank_offsets.assign(params.num_ranks + 1, 0);
  for (const Row& row : rows_of(params, inputs, rank, -1)) {
    for (std::size_t i = static_cast<std::size_t>(row.source) + 1; i <= params.num_ranks; ++i) {
      ++received.rank_offsets[i];
    }
  }
}

// Layout compact: every selection counts, and the sums are rounded up.
void count_selections(const GroupParams& params, const std::vector<RankInput>& inputs, std::uint32_t rank,
                      RankReceived& received) {
  for (const RankInput& input : inputs) {
    if (is_masked(params, static_cast<std::uint32_t>(&input - inputs.data()))) continue;
    for (std::uint32_t token = 0; token < input.num_tokens; ++token) {
      for (std::uint32_t k = 0; k < params.topk; ++k) {
        const std::int64_t expert = choice(params, input, token, k);
        if (expert < 0 || expert / experts_per_rank(params) != rank) continue;
        ++received.expert_counts[static_cast<std::size_t>(expert % experts_per_rank(params))];
      }
    }
  }
  const auto alignment = static_cast<std::int32_t>(params.alignment);
  for (std::int32_t& count : received.expert_counts) {
    while (count % alignment != 0) ++count;
  }
}

// Layouts packed and expert: counts what lies in recv_x.
void count_rows(const GroupParams& params, const std::vector<Row>& rows, RankReceived& received) {
  for (std::uint32_t i = 0; i < experts_per_rank(params); ++i) {
    std::int32_t next = received.expert_offsets[i];
    for (std::uint32_t source = 0; source < params.num_ranks; ++source) {
      const std::int32_t first = next;
      while (next < received.expert_offsets[i + 1] &&
             rows[static_cast<std::size_t>(next)].source == static_cast<std::int32_t>(source)) {
        ++next;
      }
      if (params.range_format == abi::RangeFormat::kRows) {
        received.source_ranges.insert(received.source_ranges.end(), {first, next - first});
      } else {  // an int64, its low half first
        received.source_ranges.insert(received.source_ranges.end(),
                                      {next - first, first - received.expert_offsets[i]});
      }
    }
    received.expert_counts[i] = next - received.expert_offsets[i];
  }
}

using Floats = std::vector<float>;

void round_to_bf16(Floats& values) {
  for (float& value : values) value = bf16_to_float(float_to_bf16(value));
}

void add(const std::uint16_t* row, Floats& sum) {
  for (std::size_t h = 0; h < sum.size(); ++h) sum[h] = sum[h] + bf16_to_float(row[h]);
}

void add_weighted(const std::uint16_t* row, float weight, Floats& sum) {
  for (std::size_t h = 0; h < sum.size(); ++h) sum[h] = std::fma(weight, bf16_to_float(row[h]), sum[h]);
}

// The rows of one rank, as combine sees them.
struct Answer {
  const GroupParams& params;
  std::uint32_t rank;      // that answers
  const RankInput& input;  // of the rank that combines
  const CombineInput& given;
  const CombineOptions& options;
  std::vector<Row> rows;  // as they lie in y
  std::vector<std::vector<std::size_t>>
      places;  // [n] the rows of each token, in order of the k that chose them

  std::uint32_t first_k(std::size_t place) const {
    std::uint32_t k = 0;
    while (!carries(params, rows[place],
                    choice(params, input, static_cast<std::uint32_t>(rows[place].token), k)))
      ++k;
    return k;
  }

  void find_places(std::uint32_t owner) {
    places.resize(input.num_tokens);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].source == static_cast<std::int32_t>(owner)) {
        places[static_cast<std::size_t>(rows[i].token)].push_back(i);
      }
    }
    for (auto& of_token : places) {
      std::sort(of_token.begin(), of_token.end(),
                [this](std::size_t a, std::size_t b) { return first_k(a) < first_k(b); });
    }
  }

  void add_row(std::size_t place, Floats& sum) const {
    const std::uint16_t* y = given.y.data() + place * params.hidden;
    if (options.weighted) {
      add_weighted(y, weight_of(params, input, rows[place]), sum);
    } else {
      add(y, sum);
    }
  }

  // The token's rows that are summed. A row of weight 0 is left out, whatever it holds.
  std::vector<std::size_t> summed_places(std::uint32_t token) const {
    std::vector<std::size_t> summed;
    for (const std::size_t place : places[token]) {
      if (!options.weighted || weight_of(params, input, rows[place]) != 0.0f) summed.push_back(place);
    }
    return summed;
  }

  void add_to(const std::vector<std::size_t>& summed, Floats& sum) const {
    if (params.layout == Layout::kCompact) {
      add_row(summed[0], sum);
      return;
    }
    Floats partial(params.hidden, 0.0f);
    for (const std::size_t place : summed) add_row(place, partial);
    round_to_bf16(partial);
    for (std::size_t h = 0; h < sum.size(); ++h) sum[h] = sum[h] + partial[h];
  }

  // Layout compact: adds the y_weights of the token's row here, whatever it carries.
  void add_weights_to(std::uint32_t token, Floats& sum) const {
    if (places[token].empty()) return;
    const float* weights = given.y_weights.data() + places[token][0] * params.topk;
    for (std::uint32_t k = 0; k < params.topk; ++k) sum[k] = sum[k] + weights[k];
  }

  void return_weights(std::uint32_t token, float* out) const {
    for (const std::size_t place : places[token]) {
      for (std::uint32_t k = 0; k < params.topk; ++k) {
        if (!carries(params, rows[place], choice(params, input, token, k))) continue;
        out[k] =
            given.y_weights[place * choices_per_row(params) + (params.layout == Layout::kCompact ? k : 0)];
      }
    }
  }
};

std::vector<Answer> answers_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                               const std::vector<CombineInput>& answers, const CombineOptions& options,
                               std::uint32_t rank) {
  std::vector<Answer> all;
  std::vector<std::int32_t> unused;
  for (std::uint32_t d = 0; d < params.num_ranks; ++d) {
    if (is_masked(params, d)) continue;
    all.push_back({params, d, inputs[rank], answers[d], options, rows_at(params, inputs, d, unused), {}});
    all.back().find_places(rank);
  }
  return all;
}

std::uint32_t domain_of(const GroupParams& params, std::uint32_t rank) {
  return params.sum_ranks == 0 ? 0 : rank / params.sum_ranks;
}

// Adds what the ranks of one domain have for a token: row by row, or rounded to bf16 on its way to another
// domain.
void add_domain(const std::vector<Answer>& all, std::uint32_t domain, bool is_owners, std::uint32_t token,
                Floats& sum) {
  Floats on_its_way(is_owners ? 0 : sum.size(), 0.0f);
  bool any = false;
  for (const Answer& answer : all) {
    if (domain_of(answer.params, answer.rank) != domain) continue;
    const std::vector<std::size_t> summed = answer.summed_places(token);
    if (summed.empty()) continue;
    any = true;
    answer.add_to(summed, is_owners ? sum : on_its_way);
  }
  if (!any || is_owners) return;
  round_to_bf16(on_its_way);
  for (std::size_t h = 0; h < sum.size(); ++h) sum[h] = sum[h] + on_its_way[h];
}

// kReturnSum, layout compact. Sums of other domains than the owner's are made before they are added.
void sum_weights(const std::vector<Answer>& all, const GroupParams& params, std::uint32_t owner,
                 std::uint32_t token, float* out) {
  Floats sum(params.topk, 0.0f);
  for (std::uint32_t domain = 0; domain <= domain_of(params, params.num_ranks - 1); ++domain) {
    Floats of_domain(params.topk, 0.0f);
    const bool is_owners = domain == domain_of(params, owner);
    for (const Answer& answer : all) {
      if (domain_of(params, answer.rank) == domain) answer.add_weights_to(token, is_owners ? sum : of_domain);
    }
    for (std::uint32_t k = 0; k < params.topk; ++k) sum[k] = sum[k] + of_domain[k];
  }
  for (std::uint32_t k = 0; k < params.topk; ++k)
    out[k] = std::isnan(sum[k]) ? std::numeric_limits<float>::quiet_NaN() : sum[k];
}

}  // namespace

std::uint32_t x_bytes(const GroupParams& params) {
  return params.payload == Payload::kFp8Cast ? 2 * params.hidden : row_bytes(params);
}

std::uint32_t row_bytes(const GroupParams& params) {
  switch (params.payload) {
    case Payload::kBf16: return 2 * params.hidden;
    case Payload::kFp8Cast:
    case Payload::kFp8: return params.hidden;
    case Payload::kOpaque: break;
  }
  return params.opaque_bytes;
}

std::uint32_t scale_bytes(const GroupParams& params) {
  if (params.payload != Payload::kFp8Cast && params.payload != Payload::kFp8) return 0;
  const std::uint32_t scales = (params.hidden + 127) / 128;
  if (params.scale_format != ScaleFormat::kUe8m0) return 4 * scales;
  return scales % 4 == 0 ? scales : scales + 4 - scales % 4;
}

namespace {

// Rows of a matrix of scales in columns, and what one column takes.
std::uint64_t rows_of_matrix(const GroupParams& params, std::uint64_t recv_rows) {
  return params.layout == Layout::kExpert ? params.expert_capacity : recv_rows;
}
std::uint64_t column_words(const GroupParams& params, std::uint64_t recv_rows) {
  std::uint64_t words = rows_of_matrix(params, recv_rows);
  while (words % 4 != 0) ++words;
  return words;
}

}  // namespace

std::uint64_t num_scale_words(const GroupParams& params, std::uint64_t recv_rows) {
  const std::uint64_t words = scale_bytes(params) / 4;
  if (params.scale_layout == abi::ScaleLayout::kRowMajor || recv_rows == 0) return recv_rows * words;
  return recv_rows / rows_of_matrix(params, recv_rows) * words * column_words(params, recv_rows);
}

std::uint64_t place_of_scale(const GroupParams& params, std::uint64_t recv_rows, std::uint64_t row,
                             std::uint32_t word) {
  const std::uint64_t words = scale_bytes(params) / 4;
  if (params.scale_layout == abi::ScaleLayout::kRowMajor) return row * words + word;
  const std::uint64_t matrix = row / rows_of_matrix(params, recv_rows);
  const std::uint64_t column = matrix * words + word;
  return column * column_words(params, recv_rows) + row % rows_of_matrix(params, recv_rows);
}

std::vector<std::uint8_t> scales_by_row(const GroupParams& params, std::uint64_t recv_rows,
                                        const void* recv_scales) {
  const std::uint32_t bytes = scale_bytes(params);
  std::vector<std::uint8_t> scales(recv_rows * bytes);
  for (std::uint64_t row = 0; row < recv_rows; ++row) {
    for (std::uint32_t word = 0; word < bytes / 4; ++word) {
      const std::uint64_t place = place_of_scale(params, recv_rows, row, word);
      std::memcpy(&scales[row * bytes + word * 4], static_cast<const char*>(recv_scales) + place * 4, 4);
    }
  }
  return scales;
}

std::uint32_t dropped_selections(const GroupParams& params, const RankInput& input) {
  std::uint32_t dropped = 0;
  for (std::uint32_t token = 0; token < input.num_tokens; ++token) {
    for (std::uint32_t k = 0; k < params.topk; ++k) {
      const bool chosen = input.topk_idx[std::size_t{token} * params.topk + k] >= 0;
      if (chosen && choice(params, input, token, k) < 0) ++dropped;
    }
  }
  return dropped;
}

RankReceived dispatch_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                         std::uint32_t rank) {
  RankReceived received;
  const std::vector<Row> rows = rows_at(params, inputs, rank, received.expert_offsets);
  received.num_rows = static_cast<std::uint32_t>(rows.size());
  for (const Row& row : rows) {
    if (row.source < 0) {
      append_unfilled(params, received);
    } else {
      const RankInput& input = inputs[static_cast<std::size_t>(row.source)];
      append_values(params, input, static_cast<std::uint32_t>(row.token), received);
      append_choices(params, input, row, received);
      if (params.layout == Layout::kExpert) ++received.num_recv_rows;
    }
    received.recv_src.insert(received.recv_src.end(), {row.source, row.token});
  }
  if (params.layout != Layout::kExpert) received.num_recv_rows = received.num_rows;
  received.expert_counts.assign(experts_per_rank(params), 0);
  count_sources(params, inputs, rank, received);
  if (params.layout == Layout::kCompact) {
    count_selections(params, inputs, rank, received);
  } else {
    count_rows(params, rows, received);
  }
  return received;
}

std::vector<RankReceived> dispatch(const GroupParams& params, const std::vector<RankInput>& inputs) {
  std::vector<RankReceived> received;
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    received.push_back(dispatch_to(params, inputs, rank));
  }
  return received;
}

RankCombined combine_to(const GroupParams& params, const std::vector<RankInput>& inputs,
                        const std::vector<CombineInput>& answers, const CombineOptions& options,
                        std::uint32_t rank) {
  const RankInput& input = inputs[rank];
  const std::vector<Answer> all = answers_to(params, inputs, answers, options, rank);
  RankCombined combined;
  if (options.return_weights != abi::kReturnNone) combined.out_weights.assign(input.topk_idx.size(), 0.0f);
  for (std::uint32_t token = 0; token < input.num_tokens; ++token) {
    Floats sum(params.hidden, 0.0f);
    for (const auto& bias : answers[rank].bias) {
      if (!bias.empty()) add(bias.data() + std::size_t{token} * params.hidden, sum);
    }
    for (std::uint32_t domain = 0; domain <= domain_of(params, params.num_ranks - 1); ++domain)
      add_domain(all, domain, domain == domain_of(params, rank), token, sum);
    if (options.return_weights != abi::kReturnNone) {
      float* weights = combined.out_weights.data() + std::size_t{token} * params.topk;
      if (options.return_weights == abi::kReturnSum && params.layout == Layout::kCompact) {
        sum_weights(all, params, rank, token, weights);
      } else {
        for (const Answer& answer : all) answer.return_weights(token, weights);
      }
    }
    for (const float value : sum) combined.out.push_back(float_to_bf16(value));
  }
  return combined;
}

std::vector<RankCombined> combine(const GroupParams& params, const std::vector<RankInput>& inputs,
                                  const std::vector<CombineInput>& answers, const CombineOptions& options) {
  std::vector<RankCombined> combined;
  for (std::uint32_t rank = 0; rank < params.num_ranks; ++rank) {
    combined.push_back(combine_to(params, inputs, answers, options, rank));
  }
  return combined;
}

}  // namespace epd::kernels::reference
