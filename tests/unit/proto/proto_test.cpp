// The shared-memory ABI: tags, text fields, status names, and the sizes that both sides rely on.
#include "proto/arena.h"
#include "proto/attach.h"
#include "proto/call_words.h"
#include "proto/link.h"
#include "proto/session.h"
#include "proto/wire.h"

#include <gtest/gtest.h>
#include <cstring>
#include <random>
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

TEST(OpTag, CountsFromABaseThatNoEpochPasses) {
  for (const std::uint64_t first :
       {std::uint64_t{0}, kTagRound - 1, kTagRound, 2 * kTagRound - 1, 2 * kTagRound, 3 * kTagRound + 5}) {
    const std::uint64_t base = tag_base(first);
    ASSERT_LE(base, first);
    EXPECT_LT(first - base, kTagRound);
    const std::uint64_t renewed = base + kTagRenewal;  // as far as an epoch comes, and what is in flight
    EXPECT_GT(tag_base(renewed - 1000), base) << "the next epoch has another";
    EXPECT_GT(op_tag(1, renewed + 1000 - base), op_tag(1, first - base));
    EXPECT_EQ(epoch_of_tag(op_tag(1, renewed + 1000 - base)), 1u);
    EXPECT_TRUE(same_index(first - base, first));
    EXPECT_FALSE(same_index(first - base, first + 1));
    EXPECT_TRUE(not_before(first + 3 - base, first));
    EXPECT_FALSE(not_before(first - 1, first));
  }
  EXPECT_LT(op_tag(kLastEpoch, kTagRenewal + 1000), std::uint64_t{1} << 63);
}

TEST(OpTag, NamesARoutingWhateverItsBase) {
  const std::uint64_t made = op_tag(7, kTagRound + 5);
  EXPECT_TRUE(same_routing(0, 0));
  EXPECT_TRUE(same_routing(made, made));
  EXPECT_TRUE(same_routing(made, op_tag(0, kTagRound + 5))) << "a rank that came later";
  EXPECT_TRUE(same_routing(op_tag(0, 5), made)) << "and counts from another base";
  EXPECT_FALSE(same_routing(made, op_tag(8, kTagRound + 5)));
  EXPECT_FALSE(same_routing(made, op_tag(0, 6)));
  EXPECT_FALSE(same_routing(made, 0)) << "a new one";
}

TEST(CallsAsWords, AreWordsThatEachTellTheirNumber) {
  Call call;
  call.number = 41;
  call.op = Op::kCombine;
  call.slot = kMaxDepth - 1;
  call.num_tokens = kMostCommandTokens;
  call.flagged = true;
  call.epoch = 0x1ff;
  call.flags = 0xffff;
  call.sms = kMaxCallSms;
  call.route = 4111;
  call.timeout_ms = ~0u;
  const PackedCall packed = pack(call);
  for (const std::uint64_t word : packed.words) EXPECT_EQ(word >> 32, 42u);
  const Call again = unpack(packed);
  EXPECT_EQ(again.number, call.number);
  EXPECT_EQ(again.op, call.op);
  EXPECT_EQ(again.slot, call.slot);
  EXPECT_EQ(again.num_tokens, call.num_tokens);
  EXPECT_TRUE(again.flagged);
  EXPECT_EQ(again.epoch, 0xffu);
  EXPECT_EQ(again.flags, call.flags);
  EXPECT_EQ(again.sms, call.sms);
  EXPECT_EQ(again.route, call.route);
  EXPECT_EQ(again.timeout_ms, call.timeout_ms);
  // Flags and slots that follow from any words exist.
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const Call any = unpack({{random(), random(), random(), random()}});
    EXPECT_LT(flag_of(any.op, any.slot), kCallFlags);
    EXPECT_LT(any.slot, kMaxDepth);
  }
}

TEST(CallsAsWords, HaveEndedThoughTheirCountersWrap) {
  for (const std::uint32_t done : {0u, 5u, 0u - 1, 0u - 64, 1u << 31, (1u << 31) - 1, 123456789u}) {
    SCOPED_TRACE(done);
    EXPECT_TRUE(has_ended(done, done));
    EXPECT_TRUE(has_ended(done, done - 1));
    EXPECT_FALSE(has_ended(done, done + 1));
    EXPECT_FALSE(has_ended(done, done + kCallSlots));
    for (const std::uint32_t ago : {1u << 31, (1u << 31) - 1, (1u << 31) + 1, 3u << 30, 0u - 65})
      EXPECT_TRUE(has_ended(done, done - ago)) << ago;
  }
}

TEST(FixedText, IsCutAndAlwaysTerminated) {
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

TEST(FixedText, LengthStopsAtTheFieldsEnd) {
  char field[8];
  std::memset(field, 'z', sizeof(field));
  EXPECT_EQ(text_length(field), 8u);
}

TEST(Abi, SizesAndOffsetsThatBothSidesRelyOn) {
  EXPECT_EQ(sizeof(SleepLine), 64u);
  EXPECT_EQ(sizeof(WireHeader), 16u);
  EXPECT_EQ(sizeof(GroupShape), 112u);
  // Words that one side writes often are on no cache line that the other writes.
  EXPECT_EQ(offsetof(SegmentA, client_sleep) % 64, 0u);
  EXPECT_EQ(offsetof(SegmentB, engine_sleep) % 64, 0u);
  EXPECT_EQ(sizeof(Board) % 64, 0u);
  EXPECT_EQ(offsetof(EnginePage, sleep) % 64, 0u);
}

TEST(Abi, EveryAttachMessageFitsInAPacket) {
  for (const std::size_t bytes :
       {sizeof(Hello),         sizeof(Welcome),     sizeof(Refused),     sizeof(Join),
        sizeof(Joined),        sizeof(Goodbye),     sizeof(AddSession),  sizeof(SessionFailed),
        sizeof(GroupBegin),    sizeof(GroupRank),   sizeof(GroupMember), sizeof(RankRefused),
        sizeof(GroupReady),    sizeof(Break),       sizeof(Resume),      sizeof(Settings),
        sizeof(GroupSettings), sizeof(EngineReady), sizeof(FarEngine),   sizeof(PeerLost)}) {
    EXPECT_LE(bytes + sizeof(WireHeader), kMaxMessageBytes);
  }
}

// A changed hash means that libraries and daemons built before and after can't talk: they refuse
// each other at attach. When this test fails, the change of layout must be meant; then raise
// kAbiVersion (proto/wire.h) if a version with the old layout has been released, and pin the new
// value here.
TEST(Abi, LayoutHashIsPinned) {
  EXPECT_EQ(layout_hash(), 0x4d56cfcbde6e0d0eull) << std::hex << "now 0x" << layout_hash();
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
