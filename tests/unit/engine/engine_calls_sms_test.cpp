// How many SMs the kernels have that stay on a GPU, as its driver sees it.
#include "engine_calls_fixture.h"

#include "device/launcher.h"
#include "staying_kernels.h"

#include <gtest/gtest.h>
#include <algorithm>

namespace epd::test {
namespace {

using fake_cuda::StayingKernel;

class EngineCallsSmsTest : public EngineCallsFixture {
 protected:
  std::vector<StayingKernel> kernels_on(int device) const {
    std::vector<StayingKernel> kernels = kernels_.on(device);
    std::sort(kernels.begin(), kernels.end(),
              [](const StayingKernel& a, const StayingKernel& b) { return a.ctas < b.ctas; });
    return kernels;
  }
  // Ranks of these priorities share so many SMs of the device.
  void expect_shares(int device, std::uint32_t sms, const std::vector<std::int32_t>& priorities) const {
    std::vector<StayingKernel> wanted;
    for (std::size_t i = 0; i < priorities.size(); ++i) {
      const std::uint32_t all_there_is = kSharedOptin - kernels::cuda::kStaticBytes;
      wanted.push_back({device::lane_share(sms, priorities, i), kernels::cuda::kMaxThreads, all_there_is});
    }
    std::sort(wanted.begin(), wanted.end(),
              [](const StayingKernel& a, const StayingKernel& b) { return a.ctas < b.ctas; });
    EXPECT_TRUE(comes([&] { return kernels_on(device) == wanted; })) << [&] {
      std::string text = "device " + std::to_string(device) + ", wanted:";
      for (const StayingKernel& kernel : wanted) text += " " + std::to_string(kernel.ctas);
      text += "; there are:";
      for (const StayingKernel& kernel : kernels_on(device)) text += " " + std::to_string(kernel.ctas);
      return text;
    }();
  }
  std::int32_t any_priority() { return static_cast<std::int32_t>(random_() % 16) - 8; }

 private:
  static constexpr std::uint32_t kSharedOptin = 232448;  // of an H200, which the fake is

  const StayingKernels kernels_;
};

// All of a CTA's shared memory and threads, so nothing else fits beside it. Ranks 0 and 2 of the group are on
// device 0, with another group's; rank 1 is alone on device 1.
TEST_F(EngineCallsSmsTest, EachHasItsShareByPriorityAndNothingFitsBesideIt) {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  RawGroup beside(8, shape, "cuda", 1);
  beside.calls = true;
  beside.add_to_engine({engine_view_[0]}, {&other}, 0, false);
  for (std::uint32_t i = 0; i < 12; ++i) {
    const std::uint32_t sms = 3 + random_() % 60;
    const std::int32_t ours = any_priority(), its = any_priority();
    SCOPED_TRACE(testing::Message() << sms << " SMs, priorities " << ours << " and " << its);
    for (EngineThread* engine : engine_view_) {
      engine->send(LinkType::kSettings, abi::Settings{sms, 5000, 20, 2});
      engine->send(LinkType::kGroupSettings, abi::GroupSettings{kGroup, 0, ours});
    }
    engine_view_[0]->send(LinkType::kGroupSettings, abi::GroupSettings{8, 0, its});
    run_and_check(i % kShape.depth);
    expect_shares(0, sms, {ours, ours, its});
    expect_shares(1, sms, {ours});
    if (HasFailure()) return;
  }
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
  engine_view_[0]->send(LinkType::kSettings, abi::Settings{24, 5000, 20, 2});
  expect_shares(0, 24, {0, 0});
  run_and_check(0);
}

}  // namespace
}  // namespace epd::test
