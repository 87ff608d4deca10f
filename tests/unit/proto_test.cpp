// The shared-memory ABI: tags, text fields, status names, and the sizes that both sides rely on.
#include "proto/arena.h"
#include "proto/attach.h"
#include "proto/link.h"
#include "proto/session.h"
#include "proto/wire.h"

#include <gtest/gtest.h>
#include <cstring>
#include <string>
#include <vector>

namespace epd::abi {
namespace {

TEST(OpTag, GrowsWithOperationAndEpoch) {
  constexpr std::uint64_t kLastIndex = (std::uint64_t{1} << kTagIndexBits) - 2;
  std::uint64_t last = 0;  // zeroed memory: smaller than any tag
  for (const std::uint64_t epoch :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, (std::uint64_t{1} << 24) - 1}) {
    for (const std::uint64_t index :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1000000}, kLastIndex}) {
      EXPECT_GT(op_tag(epoch, index), last) << "epoch " << epoch << ", index " << index;
      last = op_tag(epoch, index);
    }
  }
  EXPECT_NE(op_tag(1, 5), op_tag(2, 5));
  EXPECT_LT(op_tag(1, kLastIndex), op_tag(2, 0)) << "no tag of an old epoch reaches one of the new";
}

TEST(Text, IsCutAndAlwaysTerminated) {
  char field[8];
  std::memset(field, 'z', sizeof(field));
  set_text(field, "abc", 3);
  EXPECT_EQ(std::string(field), "abc");
  EXPECT_EQ(text_length(field), 3u);
  EXPECT_EQ(field[7], '\0') << "nothing of what was there before may leak to the peer";
  set_text(field, "abcdefgh", 8);
  EXPECT_EQ(std::string(field), "abcdefg");
  set_text(field, "", 0);
  EXPECT_EQ(text_length(field), 0u);
}

TEST(Text, LengthStopsAtTheFieldsEnd) {
  char field[8];
  std::memset(field, 'z', sizeof(field));
  EXPECT_EQ(text_length(field), 8u);
}

TEST(Abi, SizesAndOffsetsThatBothSidesRelyOn) {
  EXPECT_EQ(sizeof(Submission), 128u);
  EXPECT_EQ(sizeof(Completion), 64u);
  EXPECT_EQ(sizeof(IndexLine), 64u);
  EXPECT_EQ(sizeof(SleepLine), 64u);
  EXPECT_EQ(sizeof(WireHeader), 16u);
  EXPECT_EQ(sizeof(GroupShape), 64u);
  EXPECT_EQ(offsetof(Submission, sequence), 0u);
  EXPECT_EQ(offsetof(Completion, sequence), 0u);
  // What one side writes often is on no cache line that the other writes.
  EXPECT_EQ(offsetof(SegmentA, client_sleep) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentA, completion_head) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentA, submissions) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentB, engine_sleep) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentB, submission_head) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentB, completion_tail) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentB, completions) % 64, 0u);
  EXPECT_EQ(offsetof(Board, slots) % 64, 0u);
  EXPECT_EQ(sizeof(Board) % 64, 0u);
  EXPECT_EQ(offsetof(EnginePage, sleep) % 64, 0u);
}

TEST(Abi, EveryAttachMessageFitsInAPacket) {
  for (const std::size_t bytes :
       {sizeof(Hello), sizeof(Welcome), sizeof(Refused), sizeof(Join), sizeof(Joined), sizeof(Goodbye),
        sizeof(AddSession), sizeof(SessionFailed), sizeof(GroupBegin), sizeof(GroupRank), sizeof(GroupMember),
        sizeof(RankRefused), sizeof(GroupReady), sizeof(Break), sizeof(Settings), sizeof(GroupSettings)}) {
    EXPECT_LE(bytes + sizeof(WireHeader), kMaxMessageBytes);
  }
}

// A changed hash means that libraries and daemons built before and after can't talk: they refuse
// each other at attach. When this test fails, the change of layout must be meant; then raise
// kAbiVersion (proto/wire.h) if a version with the old layout has been released, and pin the new
// value here.
TEST(Abi, LayoutHashIsPinned) {
  EXPECT_EQ(layout_hash(), 0x201b20d8d855267bull) << std::hex << "now 0x" << layout_hash();
}

TEST(StatusCodes, EveryCodeHasItsOwnName) {
  std::vector<std::string> names;
  for (std::int32_t i = 0; i < kNumStatusCodes; ++i) {
    const std::string name = status_name(static_cast<StatusCode>(i));
    EXPECT_NE(name, "UNKNOWN") << i;
    for (const std::string& other : names) EXPECT_NE(name, other);
    names.push_back(name);
  }
  EXPECT_STREQ(status_name(static_cast<StatusCode>(kNumStatusCodes)), "UNKNOWN");
  EXPECT_STREQ(status_name(static_cast<StatusCode>(-1)), "UNKNOWN");
}

}  // namespace
}  // namespace epd::abi
