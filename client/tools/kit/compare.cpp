#include "kit/compare.h"

#include "kit/random.h"

#include <cstdio>
#include <cstring>
#include <vector>

namespace epd::kit {
namespace {

using kernels::reference::GroupParams;
using kernels::reference::Layout;
using kernels::reference::RankCombined;
using kernels::reference::RankInput;
using kernels::reference::RankReceived;

constexpr int kPoison = 0xA7;  // as bf16 or float32 a small negative number, as a count or index nonsense

template <typename T>
std::string in_hex(T value) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  char text[24];
  std::snprintf(text, sizeof(text), "0x%0*llx", static_cast<int>(2 * sizeof(T)), bits);
  return text;
}

// `width` values a row, from row `first` on.
template <typename T>
std::string compare_rows(const char* name, std::span<const T> expected, const T* got, std::size_t width,
                         std::size_t first = 0) {
  // Bits are compared, not values: -0 is not 0, and NaNs have payloads.
  const void* expected_bits = expected.data();
  const void* got_bits = got;
  if (expected.empty() || std::memcmp(expected_bits, got_bits, expected.size_bytes()) == 0) return "";
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (in_hex(expected[i]) == in_hex(got[i])) continue;
    return std::string(name) + "[" + std::to_string(first + i / width) + "][" + std::to_string(i % width) +
           "] is " + in_hex(got[i]) + ", expected " + in_hex(expected[i]);
  }
  return "";
}

template <typename T>
std::span<const T> view(const std::vector<T>& values) {
  return {values.data(), values.size()};
}

// Sizes of one row's parts.
struct Widths {
  explicit Widths(const GroupParams& params)
      : row(kernels::reference::row_bytes(params)),
        scales(kernels::reference::scale_bytes(params)),
        choices(params.layout == Layout::kCompact ? params.topk : 1),
        experts(params.num_experts / params.num_ranks) {}
  std::size_t row, scales;  // bytes
  std::size_t choices;
  std::size_t experts;
};

// One received row, with all that is delivered with it.
std::string compare_row(const Widths& w, const RankReceived& expected, const epd_buffers_t& got,
                        std::size_t row) {
  const auto part = [row]<typename T>(const std::vector<T>& values, std::size_t width) {
    return view(values).subspan(row * width, width);
  };
  std::string error;
  const auto also = [&](const char* name, auto wanted, const auto* base, std::size_t width) {
    if (error.empty()) error = compare_rows(name, wanted, base + row * width, width, row);
  };
  also("recv_src", part(expected.recv_src, 2), got.recv_src, 2);
  std::vector<std::int32_t> idx;  // groups have int32 indices, the oracle int64
  for (const std::int64_t value : part(expected.recv_topk_idx, w.choices))
    idx.push_back(static_cast<std::int32_t>(value));
  also("recv_topk_idx", view(idx), static_cast<const std::int32_t*>(got.recv_topk_idx), w.choices);
  also("recv_topk_weights", part(expected.recv_topk_weights, w.choices), got.recv_topk_weights, w.choices);
  if (w.scales != 0)
    also("recv_scales", part(expected.recv_scales, w.scales),
         static_cast<const std::uint8_t*>(got.recv_scales), w.scales);
  also("recv_x", part(expected.recv_x, w.row), static_cast<const std::uint8_t*>(got.recv_x), w.row);
  return error;
}

}  // namespace

void fill_bf16(std::uint64_t seed, std::uint16_t* out, std::size_t count) {
  // Sign, three bits of exponent and the mantissa are random; the exponent begins at 2^-7.
  constexpr std::uint64_t kMask = 0x83FF83FF83FF83FFull;
  constexpr std::uint64_t kBase = 0x3C003C003C003C00ull;
  const std::uint64_t start = mix64(seed);
  for (std::size_t i = 0; i < count / 4; ++i) {
    const std::uint64_t word = (mix64(start + i * 0x9e3779b97f4a7c15ull) & kMask) + kBase;
    std::memcpy(out + 4 * i, &word, sizeof(word));
  }
}

void fill_host_memory(void* region, int byte, std::size_t bytes) {
  std::memset(region, byte, bytes);
}

void poison_dispatch(const GroupParams& params, std::span<const kernels::RowRange> rows,
                     const epd_buffers_t& buffers, const FillMemory& fill) {
  const Widths w(params);
  const auto poison = [&fill](void* region, std::size_t first, std::size_t bytes) {
    if (region != nullptr && bytes != 0) fill(static_cast<char*>(region) + first, kPoison, bytes);
  };
  for (const kernels::RowRange& range : rows) {
    const auto part = [&](void* region, std::size_t width) {
      poison(region, range.begin * width, range.count * width);
    };
    part(buffers.recv_x, w.row);
    part(buffers.recv_scales, w.scales);
    part(buffers.recv_topk_idx, w.choices * sizeof(std::int32_t));
    part(buffers.recv_topk_weights, w.choices * sizeof(float));
    part(buffers.recv_src, 2 * sizeof(std::int32_t));
  }
  poison(buffers.rank_offsets, 0, (params.num_ranks + 1) * sizeof(std::int32_t));
  poison(buffers.expert_counts, 0, w.experts * sizeof(std::int32_t));
  poison(buffers.expert_offsets, 0, (w.experts + 1) * sizeof(std::int32_t));
  poison(buffers.source_ranges, 0, w.experts * params.num_ranks * 2 * sizeof(std::int32_t));
}

void poison_combine(const GroupParams& params, std::uint32_t max_tokens, const epd_buffers_t& buffers,
                    const FillMemory& fill) {
  fill(buffers.out, kPoison, std::size_t{max_tokens} * params.hidden * 2);
  fill(buffers.out_weights, kPoison, std::size_t{max_tokens} * params.topk * sizeof(float));
}

RankInput make_input(const GroupParams& params, const InputView& input) {
  RankInput made;
  made.num_tokens = input.num_tokens;
  const std::size_t choices = std::size_t{input.num_tokens} * params.topk;
  const auto bytes = [&](const void* from, std::size_t width, std::vector<std::uint8_t>& to) {
    const auto* first = static_cast<const std::uint8_t*>(from);
    if (first != nullptr) to.assign(first, first + input.num_tokens * width);
  };
  bytes(input.x, kernels::reference::x_bytes(params), made.x);
  bytes(input.x_scales, kernels::reference::scale_bytes(params), made.x_scales);
  made.topk_idx.assign(input.topk_idx, input.topk_idx + choices);
  made.topk_weights.assign(input.topk_weights, input.topk_weights + choices);
  return made;
}

std::string compare_dispatch(const GroupParams& params, const RankReceived& expected,
                             std::uint32_t num_recv_rows, const epd_buffers_t& got) {
  if (num_recv_rows != expected.num_recv_rows) {
    return "received rows: " + std::to_string(num_recv_rows) + ", expected " +
           std::to_string(expected.num_recv_rows);
  }
  std::string error =
      compare_rows("rank_offsets", view(expected.rank_offsets), got.rank_offsets, params.num_ranks + 1);
  const auto also = [&error](std::string next) {
    if (error.empty()) error = std::move(next);
  };
  also(compare_rows("expert_counts", view(expected.expert_counts), got.expert_counts, 1));
  also(compare_rows("expert_offsets", view(expected.expert_offsets), got.expert_offsets, 1));
  also(compare_rows("source_ranges", view(expected.source_ranges), got.source_ranges, 2));
  const Widths widths(params);
  for (std::size_t row = 0; row < expected.num_rows && error.empty(); ++row) {
    if (expected.recv_src[row * 2] >= 0) error = compare_row(widths, expected, got, row);
  }
  return error;
}

std::string compare_combine(const GroupParams& params, const RankCombined& expected,
                            const epd_buffers_t& got) {
  std::string error =
      compare_rows("out", view(expected.out), static_cast<const std::uint16_t*>(got.out), params.hidden);
  if (!error.empty()) return error;
  return compare_rows("out_weights", view(expected.out_weights), got.out_weights, params.topk);
}

}  // namespace epd::kit
