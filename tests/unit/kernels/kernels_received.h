// The rows that ranks receive in a test, in memory that shows every store outside, and their comparison.
#pragma once

#include "kernels_cases.h"

namespace epd::kernels::testing_cases {

// The rows that one destination receives, exactly as large as they must be.
struct Received {
  explicit Received(const Case& c)
      : rows(c.rules.recv_rows),
        x(rows * c.format().row_bytes, c.shift / 16 * 16),
        scales(c.format().scales_bytes(rows), c.shift),
        topk_idx(rows * c.choices_per_row() * (c.index64 ? 8 : 4), c.shift),
        topk_weights(rows * c.choices_per_row() * 4, c.shift),
        src(rows * 8, c.shift) {}
  DispatchTarget target() {
    return {x.as<void>(), scales.as<void>(), topk_idx.as<void>(), topk_weights.as<float>(),
            src.as<std::int32_t>()};
  }
  std::int64_t index(const Case& c, std::size_t i) const {
    return c.index64 ? topk_idx.as<std::int64_t>()[i] : topk_idx.as<std::int32_t>()[i];
  }
  // In bytes.
  std::size_t place_of_scale(const Case& c, std::size_t row, std::uint32_t word) const {
    return reference::place_of_scale(c.params, rows, row, word) * 4;
  }
  void expect_intact() const {
    x.expect_intact("recv_x");
    scales.expect_intact("recv_scales");
    topk_idx.expect_intact("recv_topk_idx");
    topk_weights.expect_intact("recv_topk_weights");
    src.expect_intact("recv_src");
  }
  std::size_t rows;
  Guarded x, scales, topk_idx, topk_weights, src;
};

std::vector<Received> poisoned(const Case& c);

// The row is as the reference says.
void expect_filled(const Case& c, const Received& actual, const reference::RankReceived& expected,
                   std::size_t row);
bool is_untouched(const Case& c, const Received& actual, std::size_t row);
bool is_filled(const reference::RankReceived& expected, std::size_t row);
// All rows are; nobody has stored into those that nobody sends, nor beside them.
void expect_received(const Case& c, const Received& actual, const reference::RankReceived& expected);

}  // namespace epd::kernels::testing_cases
