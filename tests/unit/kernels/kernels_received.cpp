#include "kernels_received.h"

namespace epd::kernels::testing_cases {

using reference::RankReceived;

std::vector<Received> poisoned(const Case& c) {
  std::vector<Received> received;
  for (std::uint32_t d = 0; d < c.params.num_ranks; ++d) received.emplace_back(c);
  return received;
}

void expect_filled(const Case& c, const Received& actual, const RankReceived& expected, std::size_t row) {
  const std::size_t x_bytes = c.format().row_bytes;
  const std::size_t scale_bytes = c.format().scale_bytes;
  const std::size_t choices = c.choices_per_row();
  expect_bits("recv_x", actual.x.as<std::uint8_t>() + row * x_bytes, expected.recv_x.data() + row * x_bytes,
              x_bytes);
  for (std::uint32_t word = 0; word < scale_bytes / 4; ++word) {
    expect_bits("recv_scales", actual.scales.as<std::uint8_t>() + actual.place_of_scale(c, row, word),
                expected.recv_scales.data() + row * scale_bytes + word * 4, 4);
  }
  for (std::size_t i = row * choices; i < (row + 1) * choices; ++i) {
    ASSERT_EQ(actual.index(c, i), expected.recv_topk_idx[i]) << "recv_topk_idx[" << i << "]";
  }
  expect_bits("recv_topk_weights", actual.topk_weights.as<float>() + row * choices,
              expected.recv_topk_weights.data() + row * choices, choices);
  expect_bits("recv_src", actual.src.as<std::int32_t>() + row * 2, expected.recv_src.data() + row * 2, 2);
}

bool is_untouched(const Case& c, const Received& actual, std::size_t row) {
  const auto poison = [row](const Guarded& guarded, std::size_t bytes) {
    return guarded.is_poison(row * bytes, (row + 1) * bytes);
  };
  for (std::uint32_t word = 0; word < c.format().scale_bytes / 4; ++word) {
    const std::size_t place = actual.place_of_scale(c, row, word);
    if (!actual.scales.is_poison(place, place + 4)) return false;
  }
  return poison(actual.x, c.format().row_bytes) &&
         poison(actual.topk_idx, std::size_t{c.choices_per_row()} * (c.index64 ? 8 : 4)) &&
         poison(actual.topk_weights, std::size_t{c.choices_per_row()} * 4) && poison(actual.src, 8);
}

bool is_filled(const RankReceived& expected, std::size_t row) {
  return row < expected.num_rows && expected.recv_src[2 * row] >= 0;
}

// After the rows of each column.
void expect_no_scales_between(const Case& c, const Received& actual) {
  std::vector<bool> of_row(c.format().scales_bytes(actual.rows) / 4);
  for (std::size_t row = 0; row < actual.rows; ++row) {
    for (std::uint32_t word = 0; word < c.format().scale_bytes / 4; ++word)
      of_row[actual.place_of_scale(c, row, word) / 4] = true;
  }
  for (std::size_t i = 0; i < of_row.size(); ++i)
    ASSERT_TRUE(of_row[i] || actual.scales.is_poison(i * 4, i * 4 + 4)) << "word " << i << " of recv_scales";
}

void expect_received(const Case& c, const Received& actual, const RankReceived& expected) {
  for (std::size_t row = 0; row < actual.rows; ++row) {
    SCOPED_TRACE(testing::Message() << "row " << row);
    if (is_filled(expected, row)) {
      expect_filled(c, actual, expected, row);
    } else {
      ASSERT_TRUE(is_untouched(c, actual, row)) << "nobody sends this row";
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  expect_no_scales_between(c, actual);
  actual.expect_intact();
}

}  // namespace epd::kernels::testing_cases
