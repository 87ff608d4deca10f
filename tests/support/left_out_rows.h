// Rows that a weighted combine leaves out: those of weight 0.
#pragma once

#include "kernels/reference.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace epd::test {

// Fills those rows of a rank's y with NaN or infinity. `received`: what the rank received, row by row.
inline void spoil_left_out_rows(const kernels::reference::GroupParams& params,
                                const std::vector<kernels::reference::RankInput>& inputs,
                                const kernels::reference::RankReceived& received, std::uint32_t rank,
                                std::vector<std::uint16_t>& y) {
  const std::int64_t local = params.num_experts / params.num_ranks;
  const bool compact = params.layout == abi::Layout::kCompact;
  for (std::size_t row = 0; row < received.num_rows; ++row) {
    const std::int32_t source = received.recv_src[2 * row];
    if (source < 0) continue;
    const kernels::reference::RankInput& input = inputs[static_cast<std::size_t>(source)];
    const std::size_t first = static_cast<std::size_t>(received.recv_src[2 * row + 1]) * params.topk;
    float weight = 0.0f;
    for (std::size_t i = first; i < first + params.topk; ++i) {
      const std::int64_t expert = input.topk_idx[i];
      const bool carried =
          expert >= 0 && expert / local == rank && (compact || expert % local == received.recv_topk_idx[row]);
      if (carried) weight += input.topk_weights[i];
    }
    const auto value = static_cast<std::uint16_t>(row % 2 == 0 ? 0x7fc0 : 0xff80);
    if (weight == 0.0f)
      std::fill_n(y.begin() + static_cast<std::ptrdiff_t>(row * params.hidden), params.hidden, value);
  }
}

}  // namespace epd::test
