#include "kit/compare.h"

#include "kit/random.h"

#include <cstdio>
#include <cstring>
#include <vector>

namespace epd::kit {
namespace {

using kernels::reference::GroupParams;
using kernels::reference::RankInput;
using kernels::reference::RankReceived;

constexpr int kPoison = 0xA7;  // as bf16 or float32 a small negative number, as a count or index nonsense
constexpr std::uint32_t kScaleBlock = 128;

template <typename T>
std::string in_hex(T value) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  char text[24];
  std::snprintf(text, sizeof(text), "0x%0*llx", static_cast<int>(2 * sizeof(T)), bits);
  return text;
}

// `width` values a row.
template <typename T>
std::string compare_rows(const char* name, std::span<const T> expected, const T* got, std::size_t width) {
  // Bits are compared, not values: -0 is not 0, and NaNs have payloads.
  const void* expected_bits = expected.data();
  const void* got_bits = got;
  if (expected.empty() || std::memcmp(expected_bits, got_bits, expected.size_bytes()) == 0) return "";
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (in_hex(expected[i]) == in_hex(got[i])) continue;
    return std::string(name) + "[" + std::to_string(i / width) + "][" + std::to_string(i % width) + "] is " +
           in_hex(got[i]) + ", expected " + in_hex(expected[i]);
  }
  return "";
}

template <typename T>
std::span<const T> view(const std::vector<T>& values) {
  return {values.data(), values.size()};
}

std::vector<std::int32_t> narrow(const std::vector<std::int64_t>& values) {
  std::vector<std::int32_t> narrowed(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) narrowed[i] = static_cast<std::int32_t>(values[i]);
  return narrowed;
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

void poison_dispatch(const GroupParams& params, std::uint32_t max_tokens, const epd_buffers_t& buffers) {
  const std::size_t rows = std::size_t{params.num_ranks} * max_tokens;
  std::memset(buffers.recv_x, kPoison, rows * params.hidden * (params.fp8 ? 1 : 2));
  if (params.fp8) {
    std::memset(buffers.recv_scales, kPoison, rows * (params.hidden / kScaleBlock) * sizeof(float));
  }
  std::memset(buffers.recv_topk_idx, kPoison, rows * params.topk * sizeof(std::int32_t));
  std::memset(buffers.recv_topk_weights, kPoison, rows * params.topk * sizeof(float));
  std::memset(buffers.recv_src, kPoison, rows * 2 * sizeof(std::int32_t));
  std::memset(buffers.rank_offsets, kPoison, (params.num_ranks + 1) * sizeof(std::int32_t));
  std::memset(buffers.expert_counts, kPoison, params.num_experts / params.num_ranks * sizeof(std::int32_t));
}

void poison_combine(const GroupParams& params, std::uint32_t max_tokens, const epd_buffers_t& buffers) {
  std::memset(buffers.out, kPoison, std::size_t{max_tokens} * params.hidden * 2);
}

RankInput make_input(const GroupParams& params, const InputView& input) {
  RankInput made;
  made.num_tokens = input.num_tokens;
  const std::size_t values = std::size_t{input.num_tokens} * params.hidden;
  const std::size_t choices = std::size_t{input.num_tokens} * params.topk;
  if (input.x != nullptr) made.x.assign(input.x, input.x + values);
  made.topk_idx.assign(input.topk_idx, input.topk_idx + choices);
  made.topk_weights.assign(input.topk_weights, input.topk_weights + choices);
  return made;
}

std::string compare_dispatch(const GroupParams& params, const RankReceived& expected,
                             std::uint32_t num_recv_rows, const epd_buffers_t& got) {
  if (num_recv_rows != expected.num_rows) {
    return "received rows: " + std::to_string(num_recv_rows) + ", expected " +
           std::to_string(expected.num_rows);
  }
  const std::size_t hidden = params.hidden;
  const std::size_t topk = params.topk;
  const std::vector<std::int32_t> idx = narrow(expected.recv_topk_idx);
  std::string error =
      compare_rows("rank_offsets", view(expected.rank_offsets), got.rank_offsets, params.num_ranks + 1);
  auto also = [&error](std::string next) {
    if (error.empty()) error = std::move(next);
  };
  also(compare_rows("expert_counts", view(expected.expert_counts), got.expert_counts, 1));
  also(compare_rows("recv_src", view(expected.recv_src), got.recv_src, 2));
  also(compare_rows("recv_topk_idx", view(idx), static_cast<const std::int32_t*>(got.recv_topk_idx), topk));
  also(compare_rows("recv_topk_weights", view(expected.recv_topk_weights), got.recv_topk_weights, topk));
  if (params.fp8) {
    also(compare_rows("recv_scales", view(expected.recv_scales), got.recv_scales, hidden / kScaleBlock));
    also(compare_rows("recv_x", view(expected.recv_e4m3), static_cast<const std::uint8_t*>(got.recv_x),
                      hidden));
  } else {
    also(compare_rows("recv_x", view(expected.recv_bf16), static_cast<const std::uint16_t*>(got.recv_x),
                      hidden));
  }
  return error;
}

std::string compare_combine(const GroupParams& params, std::span<const std::uint16_t> expected,
                            const epd_buffers_t& got) {
  return compare_rows("out", expected, static_cast<const std::uint16_t*>(got.out), params.hidden);
}

}  // namespace epd::kit
