// How many SMs operations of calls have, as the GPU's driver sees it.
#include "engine_fixture.h"

#include "kernels/cuda.h"
#include "kernels/workers.h"
#include "staying_kernels.h"

#include <gtest/gtest.h>
#include <chrono>
#include <thread>

namespace epd::test {
namespace {

using fake_cuda::StayingKernel;

class EngineCallsSmsTest : public EngineFixture {
 protected:
  // A dispatch that waits for the others, until `look` has seen it.
  template <typename Look>
  void while_waiting(const std::vector<std::uint32_t>& first, Look look) {
    const std::uint32_t slot = static_cast<std::uint32_t>(next_ % kShape.depth);
    const auto inputs = fill(slot);
    there_ = first;
    auto numbers = ask(call_on(Op::kDispatch, slot), inputs);
    look();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      if (std::find(first.begin(), first.end(), rank) != first.end()) continue;
      there_ = {rank};
      numbers[rank] = ask(call_on(Op::kDispatch, slot), inputs)[rank];
    }
    there_ = {0, 1, 2};
    await_ends(numbers);
    if (!HasFatalFailure()) check_rows(slot, inputs);
  }
  std::vector<unsigned> ctas_on(int device) const {
    std::vector<unsigned> ctas;
    for (const StayingKernel& kernel : kernels_.on(device)) ctas.push_back(kernel.ctas);
    std::sort(ctas.begin(), ctas.end());
    return ctas;
  }
  void set_sms(std::uint32_t sms, std::uint32_t linger_us = 0) {
    for (EngineThread* engine : engine_view_)
      engine->send(LinkType::kSettings, abi::Settings{sms, 5000, linger_us, 20, "info"});
    break_and_resume(StatusCode::kAborted);  // after that
  }

  static constexpr std::uint32_t kSharedOptin = 232448;  // of an H200, which the fake is
  const StayingKernels kernels_;
};

// Rank 1 is alone on its device.
TEST_F(EngineCallsSmsTest, AnOperationHasAllSmsThatAreSetAndNothingFitsBesideIt) {
  for (const std::uint32_t sms : {40u, 3u, 1u, 24u}) {
    set_sms(sms);
    while_waiting({1}, [&] {
      const std::vector<StayingKernel> wanted{
          {sms, kernels::kMaxThreads, kSharedOptin - kernels::cuda::kStaticBytes}};
      EXPECT_TRUE(comes([&] { return kernels_.on(1) == wanted; })) << testing::PrintToString(ctas_on(1));
    });
  }
  EXPECT_TRUE(comes([&] { return kernels_.on(1).empty(); })) << "nothing stays";
}

// Ranks 0 and 2. The first to ask may get more.
TEST_F(EngineCallsSmsTest, OperationsOfADeviceHaveNoMoreSmsThanAreSetAndNoFewerThanGuaranteed) {
  for (const std::uint32_t sms : {40u, 6u, 2u}) {
    set_sms(sms);
    while_waiting({0, 2}, [&] {
      EXPECT_TRUE(comes([&] { return ctas_on(0).size() == 2; }));
      const std::vector<unsigned> ctas = ctas_on(0);
      EXPECT_GE(ctas.front(), std::min(16u, sms) / 2);
      EXPECT_LE(ctas.front() + ctas.back(), sms);
    });
  }
  EXPECT_TRUE(comes([&] { return kernels_.on(0).empty(); })) << "nothing stays";
}

TEST_F(EngineCallsSmsTest, SmsLingerAsIsSetForTheDeviceOrTheGroup) {
  constexpr int kTries = 20;  // lingering may be over when a test that was held up looks
  const auto lingers = [&] {
    for (int i = 0; i < kTries; ++i) {
      run_and_check(static_cast<std::uint32_t>(next_ % kShape.depth));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // others have left by then
      if (HasFatalFailure() || !kernels_.on(1).empty()) return true;
    }
    return false;
  };
  set_sms(4, abi::kMaxLingerUs);
  EXPECT_TRUE(lingers());
  set_sms(4);
  EXPECT_TRUE(comes([&] { return kernels_.on(1).empty(); }));
  for (EngineThread* engine : engine_view_)
    engine->send(LinkType::kGroupSettings, abi::GroupSettings{kGroup, 0, 0, 1, abi::kMaxLingerUs});
  break_and_resume(StatusCode::kAborted);  // after that
  EXPECT_TRUE(lingers());
  EXPECT_TRUE(comes([&] { return kernels_.on(1).empty(); }));
}

}  // namespace
}  // namespace epd::test
