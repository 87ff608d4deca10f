// A network that can't be opened at first.
#include "late_network.h"

#include <gtest/gtest.h>
#include <atomic>
#include <thread>

namespace epd::engine {
namespace {

using std::chrono::milliseconds;

TEST(LateNetwork, IsTriedUntilItOpensAndThenNoMore) {
  std::atomic<int> tries = 0;
  std::atomic<int> told = 0;
  LateNetwork network([&] { return ++tries == 3; }, milliseconds(1), [&] { ++told; });
  while (told == 0) std::this_thread::yield();
  EXPECT_TRUE(network.is_there());
  EXPECT_EQ(tries, 3);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(tries, 3);
  EXPECT_EQ(told, 1);
}

TEST(LateNetwork, ItsEndDoesNotWaitForTheNextTry) {
  std::atomic<int> tries = 0;
  {
    const LateNetwork network([&] { return ++tries == 0; }, std::chrono::hours(24), [] {});
  }
  EXPECT_EQ(tries, 0);
}

}  // namespace
}  // namespace epd::engine
