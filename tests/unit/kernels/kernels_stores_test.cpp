// Which stores are chosen, from times that the test makes up.
#include "host/store_policy.h"

#include <gtest/gtest.h>

namespace epd::kernels::host {
namespace {

constexpr std::size_t kSmall = std::size_t{1} << 20;
constexpr std::size_t kLarge = kStreamingVolume + 1;

// `calls` operations of kSmall bytes; how many of them streamed.
std::uint32_t run(StorePolicy& policy, std::uint32_t calls, std::uint64_t cached_ns,
                  std::uint64_t streaming_ns) {
  std::uint32_t streamed = 0;
  for (std::uint32_t i = 0; i < calls; ++i) {
    const Stores stores = policy.choose(kSmall);
    if (stores == Stores::kStreaming) ++streamed;
    policy.learn(stores, kSmall, kSmall, stores == Stores::kStreaming ? streaming_ns : cached_ns);
  }
  return streamed;
}

TEST(StorePolicy, LargeVolumesStreamWhateverWasLearned) {
  StorePolicy policy;
  EXPECT_EQ(policy.choose(kLarge), Stores::kStreaming);
  run(policy, 1000, 1000, 9000);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(policy.choose(kLarge), Stores::kStreaming);
}

TEST(StorePolicy, KeepsOrdinaryStoresWhereTheyAreNotMuchSlower) {
  StorePolicy policy;
  EXPECT_EQ(policy.preferred(kSmall), Stores::kCached);
  const std::uint32_t early = run(policy, StorePolicy::kEarlyCalls, 1000, 800);
  EXPECT_EQ(early, StorePolicy::kEarlyCalls / 16) << "trials only";
  EXPECT_EQ(run(policy, 2560, 1000, 800), 10u) << "trials only";
  EXPECT_EQ(policy.preferred(kSmall), Stores::kCached);
}

TEST(StorePolicy, StreamsWhereReadersAreFar) {
  StorePolicy policy;
  run(policy, 32, 5000, 1000);
  EXPECT_EQ(policy.preferred(kSmall), Stores::kStreaming);
  EXPECT_GE(run(policy, 1600, 5000, 1000), 1500u);
}

TEST(StorePolicy, LearnsAnew) {
  StorePolicy policy;
  run(policy, 1000, 5000, 1000);
  ASSERT_EQ(policy.preferred(kSmall), Stores::kStreaming);
  run(policy, 256 * 8, 900, 1000);
  EXPECT_EQ(policy.preferred(kSmall), Stores::kCached);
}

TEST(StorePolicy, APausedThreadTeachesLittle) {
  StorePolicy policy;
  run(policy, 200, 1000, 900);
  for (int i = 0; i < 100; ++i) {
    policy.learn(Stores::kCached, kSmall, kSmall, 10000000);
    ASSERT_EQ(policy.preferred(kSmall), Stores::kCached);
    policy.learn(Stores::kCached, kSmall, kSmall, 1000);
  }
}

TEST(StorePolicy, SmallCallsAreNotTimed) {
  StorePolicy policy;
  policy.learn(Stores::kCached, kSmall, StorePolicy::kLeastBytes - 1, 1000000);
  policy.learn(Stores::kStreaming, kSmall, StorePolicy::kLeastBytes - 1, 1);
  EXPECT_EQ(policy.preferred(kSmall), Stores::kCached);
}

}  // namespace
}  // namespace epd::kernels::host
