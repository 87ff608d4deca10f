// Range checks in device code that one thread runs: a number beyond its bound ends the process, and the
// message says where, which and what was allowed. Compiled with EPD_KERNEL_ASSERTS.
#include "cuda/resident/watch.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>

namespace epd::kernels::cuda {
namespace {

// All memory is the device's.
class AnyMemory : public ordered::Player {
 public:
  AnyMemory() { ordered::player = this; }
  ~AnyMemory() override { ordered::player = nullptr; }
  AnyMemory(const AnyMemory&) = delete;
  AnyMemory& operator=(const AnyMemory&) = delete;
  void begin(const void*, std::size_t) override {}
  void end() override {}
  void look_again(std::uint32_t) override {}
  std::uint64_t nanoseconds() override { return 0; }
};

class RangeChecks : public testing::Test {
 protected:
  static constexpr std::uint32_t kRoutes = 3;

  RangeChecks() {
    own_.host = host_.get();
    own_.view = view_.get();
    own_.state = &state_;
    own_.words = &words_;
    own_.routes = routes_.data();
    own_.limits.num_routes = kRoutes;
    routes_[kRoutes - 1].num_tokens = 77;
    host_->start.routes = starts_.data();
    host_->start.num_routes = kRoutes;
    starts_[kRoutes - 1].num_tokens = 78;
    state_.enabled_epoch = 1;
  }

  AnyMemory memory_;
  std::unique_ptr<CallHost> host_ = std::make_unique<CallHost>();
  std::unique_ptr<DeviceView> view_ = std::make_unique<DeviceView>();
  CallState state_{};
  abi::CallWords words_{};
  // One more than the limits say, so that it is the check that ends the process.
  alignas(16) std::array<RouteState, kRoutes + 1> routes_{};
  alignas(16) std::array<RouteState, kRoutes + 1> starts_{};
  CallArguments own_;
  Watch watch_{};
};

using RangeChecksDeathTest = RangeChecks;

TEST_F(RangeChecksDeathTest, ARoutingRecordBeyondTheLast) {
  EXPECT_EQ(route_of(own_, watch_, kRoutes - 1).num_tokens, 77u);
  EXPECT_DEATH(route_of(own_, watch_, kRoutes),
               "cuda/resident/watch\\.h:[0-9]+: record is 3, allowed: below 3\n");
}

TEST_F(RangeChecksDeathTest, MoreRoutingsThanThereAreRecords) {
  take_enabled_epoch(own_, watch_);
  EXPECT_EQ(routes_[kRoutes - 1].num_tokens, 78u);
  host_->start.num_routes = kRoutes + 1;
  EXPECT_DEATH(take_enabled_epoch(own_, watch_),
               "cuda/resident/watch\\.h:[0-9]+: routes is 4, allowed: at most 3\n");
}

TEST_F(RangeChecksDeathTest, AJournalEntryThatTheHostHasNotRead) {
  watch_.journal_read = 5;
  watch_.state.journal = 5 + kJournalEntries - 1;
  write_journal(own_, watch_, {}, kByStreams, 9);
  EXPECT_EQ(host_->journal[4].index, 9u);
  EXPECT_DEATH(
      write_journal(own_, watch_, {}, kByStreams, 10),
      "cuda/resident/watch\\.h:[0-9]+: watch\\.state\\.journal - watch\\.journal_read is 1024, allowed: "
      "below 1024\n");
}

TEST(RangeCheckDeathTest, NegativeNumbersAreBeyondAllBounds) {
  const std::int32_t none = -1;
  EPD_BELOW_OR_NONE(none, 4u);
  EPD_BELOW_OR_NONE(~0u, 4u);
  EPD_AT_MOST(4u, std::uint64_t{4});
  EXPECT_DEATH(EPD_BELOW(none, 4u), "none is -1, allowed: below 4\n");
  EXPECT_DEATH(EPD_BELOW_OR_NONE(none - 1, 4u), "none - 1 is -2, allowed: none, or below 4\n");
  EXPECT_DEATH(EPD_AT_MOST(none, std::uint64_t{4}), "none is -1, allowed: at most 4\n");
}

}  // namespace
}  // namespace epd::kernels::cuda
