// The heads of routing records, which lie in device memory: what stands after a break, and in how many copies
// that is known.
#include "standing_routings.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace epd::engine {
namespace {

using Head = abi::RoutingRecord;

// Its memory is the test's.
class CountingLauncher final : public device::Launcher {
 public:
  Result<std::unique_ptr<device::Lane>> open_lane(const device::LaneShape&) override {
    return internal_error("no lanes");
  }
  void read(void* to, const void* device, std::size_t bytes) override {
    ++copies;
    std::memcpy(to, device, bytes);
  }
  void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                 std::size_t rows) override {
    ++copies;
    for (std::size_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * bytes,
                  static_cast<const std::byte*>(device) + row * stride, bytes);
    }
  }
  void write(void* device, const void* from, std::size_t bytes) override { std::memcpy(device, from, bytes); }
  void clear(void* device, std::size_t bytes) override {
    ++clears;
    std::memset(device, 0, bytes);
  }

  void close_calls(std::byte*) override {}

  int copies = 0;
  int clears = 0;
};

class StandingRoutings : public ::testing::Test {
 protected:
  static abi::GroupShape shape() {
    abi::GroupShape s{2, 4, 5, 128, 2, 2, {}, {}, {}};
    s.num_handles = 300;
    return s;
  }
  std::byte* half(std::uint32_t record, std::uint32_t number) {
    return arena_.data() + layout_.routing_of(record) + layout_.half_bytes * number;
  }
  Head head_at(std::uint32_t record, std::uint32_t number) {
    Head head;
    std::memcpy(&head, half(record, number), sizeof(head));
    return head;
  }

  std::vector<StandingRouting> look(std::uint64_t next) {
    return standing_routings(shape(), launcher_, next, arena_.data());
  }

  // Dispatches of a group that has begun with operation `first`, 200 in an epoch. The last 200 are undone.
  void expect_standing(std::uint64_t first) {
    const std::uint64_t next = first + 1000;
    std::vector<StandingRouting> expected(records_);
    std::vector<std::uint64_t> last(records_);
    std::vector<bool> later(std::size_t{records_} * 2);
    for (std::uint32_t record = 0; record < records_; ++record) {
      for (std::uint32_t number = 0; number < 2; ++number) {
        if (random_() % 4 == 0) continue;  // nothing was ever there
        const std::uint64_t since = random_() % 1200;
        const std::uint64_t index = first + since;
        Head head{};
        head.handle = index - abi::tag_base(first + since / 200 * 200) + 1;
        head.epoch = 1 + since / 200;
        head.num_tokens = random_() % 6;
        std::memcpy(half(record, number), &head, sizeof(head));
        later[std::size_t{record} * 2 + number] = index >= next;
        if (index >= next || index < last[record]) continue;
        if (index == last[record] && expected[record].head.handle != 0) continue;
        expected[record] = {head, number};
        last[record] = index;
      }
    }
    const auto standing = look(next);
    EXPECT_EQ(launcher_.copies, 1) << "of " << records_ << " records";
    ASSERT_EQ(standing.size(), records_);
    for (std::uint32_t record = 0; record < records_; ++record) {
      SCOPED_TRACE("record " + std::to_string(record));
      EXPECT_EQ(standing[record].head.handle, expected[record].head.handle);
      if (expected[record].head.handle == 0) continue;
      EXPECT_EQ(standing[record].half, expected[record].half);
      EXPECT_EQ(standing[record].head.epoch, expected[record].head.epoch);
      EXPECT_EQ(standing[record].head.num_tokens, expected[record].head.num_tokens);
    }
    for (std::uint32_t i = 0; i < records_ * 2; ++i) {
      if (later[i]) {
        EXPECT_EQ(head_at(i / 2, i % 2).handle, 0u) << "of a dispatch that is done again: record " << i / 2;
      }
    }
    EXPECT_EQ(launcher_.clears, std::count(later.begin(), later.end(), true));
  }

  std::mt19937 random_{std::random_device{}()};
  const abi::ExchangeArenaLayout layout_{shape()};
  const std::uint32_t records_ = static_cast<std::uint32_t>(shape().num_routes());
  std::vector<std::byte> arena_ = std::vector<std::byte>(layout_.total_bytes);
  CountingLauncher launcher_;
};

TEST_F(StandingRoutings, WhatStandsIsReadInOneCopy) {
  expect_standing(0);
}

// The fourth of nine epochs is the first to count from the next base.
TEST_F(StandingRoutings, WhatStandsIsFoundThoughTagsHaveBegunAnew) {
  expect_standing(abi::kTagRound - 600);
}

// The words that kernels have written since the last poll count, not those that it read.
TEST_F(StandingRoutings, EachLookIsFresh) {
  EXPECT_EQ(look(0)[7].head.handle, 0u);
  const Head head{random_() % 50 + 1, 3, 4, 0, 0, 0};
  std::memcpy(half(7, 1), &head, sizeof(head));
  const StandingRouting now = look(100)[7];
  EXPECT_EQ(now.head.handle, head.handle);
  EXPECT_EQ(now.half, 1u);
  EXPECT_EQ(launcher_.copies, 2);
}

}  // namespace
}  // namespace epd::engine
