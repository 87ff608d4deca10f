#include "far/judge.h"

#include "proto/far_statistics.h"

#include <algorithm>
#include <numeric>

namespace epd::far {

const char* drop_name(Drop drop) {
  static_assert(kNumDrops == abi::kNumFarDrops);
  const auto index = static_cast<std::uint32_t>(drop);
  return index < kNumDrops ? abi::kFarDropNames[index] : "unknown";
}

std::uint64_t DropCounts::total() const {
  return std::accumulate(counts_.begin(), counts_.end(), std::uint64_t{0});
}

bool DropCounts::any_fault() const {
  for (std::uint32_t i = 0; i < kNumDrops; ++i) {
    if (counts_[i] != 0 && !happens(static_cast<Drop>(i))) return true;
  }
  return false;
}

std::string DropCounts::text() const {
  std::string text;
  for (std::uint32_t i = 0; i < kNumDrops; ++i) {
    if (counts_[i] == 0) continue;
    if (!text.empty()) text += ", ";
    text += std::string(drop_name(static_cast<Drop>(i))) + ' ' + std::to_string(counts_[i]);
  }
  return text.empty() ? "none" : text;
}

FarSizes::FarSizes(const abi::GroupShape& shape, std::uint32_t most_ranks, std::uint32_t bytes,
                   std::uint32_t window_bytes) {
  for (std::uint32_t i = 0; i < shape.num_formats(); ++i) {
    const abi::GroupShape of = shape.with_format(i);
    row_stride[i] =
        static_cast<std::uint32_t>(abi::far_row_bytes(of.row_bytes() + of.scale_bytes(), of.topk));
  }
  ask_stride = static_cast<std::uint32_t>(abi::far_ask_bytes(shape.topk));
  const std::uint64_t sum_bytes = std::uint64_t{shape.hidden} * 2;
  sum_stride[0] = static_cast<std::uint32_t>(abi::far_sum_bytes(sum_bytes, 0));
  sum_stride[1] = static_cast<std::uint32_t>(abi::far_sum_bytes(sum_bytes, shape.topk));
  const std::uint32_t sums = std::min(shape.topk, most_ranks);  // of a token, at one node
  batch_bytes = std::max(
      {bytes, *std::max_element(row_stride.begin(), row_stride.end()), ask_stride, sum_stride[1] * sums});
  window = std::max(2u, window_bytes / std::max(1u, bytes));
}

}  // namespace epd::far
