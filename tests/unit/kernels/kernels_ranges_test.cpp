// Range checks in device code that one thread runs: a number beyond its bound ends the process, and the
// message says where, which and what was allowed. Compiled with EPD_KERNEL_ASSERTS.
#include "cuda/workers/call_gate.h"

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
    gate_.routes[kRoutes - 1].num_tokens = 77;
    host_->start.routes = starts_.data();
    host_->start.num_routes = kRoutes;
    starts_[kRoutes - 1].num_tokens = 78;
    gate_.enabled_epoch = 1;
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
  Gate gate_{};
};

using RangeChecksDeathTest = RangeChecks;

TEST_F(RangeChecksDeathTest, ARoutingRecordBeyondTheLast) {
  EXPECT_EQ(route_of(own_, gate_, kRoutes - 1).num_tokens, 77u);
  EXPECT_DEATH(route_of(own_, gate_, kRoutes),
               "cuda/workers/call_gate\\.h:[0-9]+: record is 3, allowed: below 3\n");
}

TEST_F(RangeChecksDeathTest, MoreRoutingsThanThereAreRecords) {
  take_enabled_epoch(own_, gate_);
  EXPECT_EQ(routes_[kRoutes - 1].num_tokens, 78u);
  host_->start.num_routes = kRoutes + 1;
  EXPECT_DEATH(take_enabled_epoch(own_, gate_),
               "cuda/workers/call_gate\\.h:[0-9]+: routes is 4, allowed: at most 3\n");
}

TEST_F(RangeChecksDeathTest, AResultBeyondTheLastPlace) {
  abi::CallResult place{};
  conclude_result(own_, {&place, 1}, abi::result_of(abi::kOnceResults - 1, 0), {}, 9);
  EXPECT_EQ(static_cast<std::uint32_t>(place.words[abi::CallResult::kIndexLow]), 9u);
  EXPECT_DEATH(conclude_result(own_, {&place, 1}, abi::result_of(abi::kResultPlaces, 0), {}, 9),
               "cuda/workers/ends\\.h:[0-9]+: place is [0-9]+, allowed: below [0-9]+\n");
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
