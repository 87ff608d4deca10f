// Which breaks operators are told of.
#include "orders.h"

#include <gtest/gtest.h>

namespace epd::supervisor {
namespace {

abi::Break break_of(std::uint64_t group, std::uint64_t epoch, std::uint32_t fatal) {
  abi::Break message{};
  message.group_id = group;
  message.epoch = epoch;
  message.fatal = fatal;
  return message;
}

TEST(ToldBreaks, EachIsToldOnce) {
  ToldBreaks told;
  const auto tell = [&told](const abi::Break& message) {
    return told.tell(message, 2, [](std::uint64_t) { return true; });
  };
  EXPECT_TRUE(tell(break_of(1, 1, 0)));
  EXPECT_TRUE(tell(break_of(2, 1, 0)));
  EXPECT_FALSE(tell(break_of(1, 1, 0)));
  EXPECT_TRUE(tell(break_of(1, 1, 1)));
  EXPECT_TRUE(tell(break_of(1, 2, 1)));
  EXPECT_FALSE(tell(break_of(2, 1, 0)));
}

// Those that ended while their engine was down stayed for the daemon's life.
TEST(ToldBreaks, GroupsThatHaveEndedAreForgotten) {
  ToldBreaks told;
  for (std::uint64_t group = 1; group <= 100; ++group) {
    EXPECT_TRUE(told.tell(break_of(group, 1, 1), 1, [group](std::uint64_t id) { return id == group; }));
    EXPECT_LE(told.size(), 2u);
  }
}

}  // namespace
}  // namespace epd::supervisor
