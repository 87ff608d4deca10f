// Messages that have come otherwise than they were sent, or not at all: each is dropped and counted, and the
// engine that sent it is told of.
#include "far/flow.h"
#include "far/seal.h"
#include "far_world.h"

#include <functional>
#include <string>

namespace epd::far {
namespace {

using abi::FarCheck;
using abi::FarHeader;
using abi::FarType;

// One message of each kind that has a body, from rank 0 on node 0 to its gateway, rank 1 on node 1.
class FarSeal : public ::testing::TestWithParam<FarCheck>, private Receiver {
 protected:
  static constexpr std::uint64_t kGapNs = 1'000'000;

  FarSeal() { begin(2); }
  ~FarSeal() override { end(); }
  void begin(std::uint64_t epoch) {
    world_.begin(epoch);
    group().open(1, abi::op_tag(epoch, 0), *this);
    epoch_ = epoch;
  }
  void end() {
    group().close(1, abi::op_tag(epoch_, 0));
    for (const Arrival& arrival : taken_) group().settle(arrival);
    taken_.clear();
    for (const std::uint32_t node : {0, 1}) world_.group(node).end();
  }
  Drop receive(const Arrival& arrival) override {
    taken_.push_back(arrival);
    return Drop::kNone;
  }
  FarGroup& group() { return world_.group(1); }

  struct Sent {
    FarHeader header;
    std::vector<std::byte> body;
  };
  Sent sent(FarType type = FarType::kRows) {
    Message message;
    FarHeader& h = message.header;
    h.type = type;
    h.tag = abi::op_tag(epoch_, 0);
    h.to_rank = 1;
    const auto& sizes = group().sizes();
    h.records = type == FarType::kAnnounce ? 0 : 1;
    h.body_bytes = type == FarType::kRows  ? sizes.row_stride[0]
                   : type == FarType::kAsk ? sizes.ask_stride
                                           : static_cast<std::uint32_t>(sizeof(abi::FarAnnouncement));
    message.engine = 101;
    message.body = Buffer(h.body_bytes);
    std::memset(message.body.data(), 0x5a, h.body_bytes);
    world_.group(0).seal(message);
    return {h, {message.body.data(), message.body.data() + h.body_bytes}};
  }
  void deliver(const Sent& s) { world_.deliver(100, 101, s.header, s.body); }
  std::uint64_t drops(Drop why) { return group().drops().of(why); }
  std::string fault() {
    const auto faults = group().take_faults();
    if (faults.empty()) return "";
    EXPECT_EQ(faults.size(), 1u);
    EXPECT_EQ(faults[0].engine, 100u);
    return faults[0].what;
  }

  testing_world::World world_{testing_world::small_shape(3, 2), {0, 1, 1}, 1, GetParam(), kGapNs};
  std::uint64_t epoch_ = 0;
  std::vector<Arrival> taken_;
};

INSTANTIATE_TEST_SUITE_P(Checks, FarSeal,
                         ::testing::Values(FarCheck::kHeaders, FarCheck::kCrc, FarCheck::kMac),
                         [](const auto& check) { return std::string(abi::far_check_name(check.param)); });

TEST_P(FarSeal, NoFlippedBitOfAHeaderPasses) {
  const FarHeader header = sent().header;
  EXPECT_TRUE(header_is_whole(header));
  for (std::size_t bit = 0; bit < 8 * sizeof(header); ++bit) {
    FarHeader flipped = header;
    reinterpret_cast<std::uint8_t*>(&flipped)[bit / 8] ^= 1u << bit % 8;
    EXPECT_FALSE(header_is_whole(flipped)) << "bit " << bit;
  }
}

// Records have CRCs of their own (kernels_far_*_test), for which the body's stands.
TEST_P(FarSeal, NoFlippedBitOfABodyPasses) {
  std::uint64_t expected = 0;
  for (const FarType type : {FarType::kAnnounce, FarType::kRows, FarType::kAsk}) {
    if (GetParam() == FarCheck::kHeaders && type != FarType::kAnnounce) continue;  // not its business
    Sent message = sent(type);
    const bool records = GetParam() == FarCheck::kCrc && type != FarType::kAnnounce;
    const std::size_t first = records ? message.body.size() - abi::kFarCrcBytes : 0;
    for (std::size_t bit = 8 * first; bit < 8 * message.body.size(); ++bit) {
      message.body[bit / 8] ^= std::byte(1u << bit % 8);
      deliver(message);
      EXPECT_EQ(drops(Drop::kChecksum), ++expected) << "bit " << bit;
      message.body[bit / 8] ^= std::byte(1u << bit % 8);
    }
    EXPECT_TRUE(taken_.empty());
    const bool by_mac = GetParam() == FarCheck::kMac && type != FarType::kAnnounce;
    EXPECT_EQ(fault(), "sent " + std::string(abi::far_type_name(type)) +
                           " of rank 0 to rank 1 with a wrong " + (by_mac ? "MAC" : "checksum"))
        << "once for a while, whatever comes";
    deliver(message);
    EXPECT_EQ(taken_.size(), 1u) << "as it was sent";
    end();
    begin(epoch_ + 1);
  }
  EXPECT_EQ(group().drops().total(), expected);
  EXPECT_EQ(world_.held(), 0u);
}

TEST_P(FarSeal, RowsThatTheNetworkChecksAreTakenAsTheyAre) {
  Sent message = sent();
  EXPECT_EQ(message.header.body_crc != 0, GetParam() == FarCheck::kCrc);
  message.body.back() ^= std::byte{1};
  deliver(message);
  EXPECT_EQ(taken_.size(), GetParam() == FarCheck::kHeaders ? 1u : 0u);
}

TEST_P(FarSeal, AMessageIsTakenOnceWhateverTheOrder) {
  const std::vector<Sent> messages{sent(), sent(), sent()};
  for (const std::size_t which : {2, 0, 2, 1, 0, 1}) deliver(messages[which]);
  EXPECT_EQ(taken_.size(), 3u);
  EXPECT_EQ(drops(Drop::kNumber), 3u);
  EXPECT_EQ(fault(), "");
}

TEST_P(FarSeal, AMessageThatNeverComesIsNoticed) {
  (void)sent();
  group().step(1);
  deliver(sent());
  EXPECT_EQ(group().due_ns() == 0, false);
  group().step(kGapNs);
  EXPECT_EQ(fault(), "");
  group().step(kGapNs + 1);
  EXPECT_EQ(fault(), "sent message 1, which has not come for 1 ms though later ones have");
  group().step(2 * kGapNs);
  EXPECT_EQ(fault(), "");
  group().step(2 * kGapNs + 1);
  EXPECT_EQ(fault(), "sent message 1, which has not come for 1 ms though later ones have")
      << "told again, as long as the epoch lasts: nobody may have heard it";
}

// Nothing told that it was missing: its operation waited for its deadline.
TEST_P(FarSeal, AMessageThatIsTheLastAndNeverComesIsNoticed) {
  FarHeader header{};
  header.type = FarType::kAnnounce;
  header.tag = abi::op_tag(epoch_, 0);
  header.to_rank = 1;
  header.body_bytes = sizeof(abi::FarAnnouncement);
  world_.group(0).post(header, Buffer(header.body_bytes));
  while (!world_.group(0).step(1)) {
  }
  world_.lose_all();
  for (int i = 0; i < 150; ++i) world_.step();
  EXPECT_EQ(fault(), "sent message 1, which has not come for 1 ms though later ones have");
  EXPECT_EQ(world_.group(0).due_ns(), 0u) << "it says so once";
  EXPECT_EQ(group().drops().total(), 0u);
}

class FarMac : public FarSeal {};
INSTANTIATE_TEST_SUITE_P(Check, FarMac, ::testing::Values(FarCheck::kMac));

// A reader of the network knows tokens and can make checksums.
TEST_P(FarMac, NoFieldThatSomebodyChangesPasses) {
  const Sent genuine = sent();
  const std::vector<std::function<void(FarHeader&)>> lies{
      [](FarHeader& h) { h.number += 1; },  [](FarHeader& h) { h.batch += 1; },
      [](FarHeader& h) { h.time_ns += 1; }, [](FarHeader& h) { h.flags = abi::kFarDone, h.batches = 1; },
      [](FarHeader& h) { ++h.mac[15]; },    [](FarHeader& h) { h.tag = abi::op_tag(2, 1); }};
  for (std::size_t i = 0; i < lies.size(); ++i) {
    Sent forged = genuine;
    lies[i](forged.header);
    seal(forged.header, forged.body, FarCheck::kMac);
    deliver(forged);
    EXPECT_EQ(drops(Drop::kChecksum), i + 1);
  }
  EXPECT_EQ(fault(), "sent rows of rank 0 to rank 1 with a wrong MAC");
  deliver(genuine);
  EXPECT_EQ(taken_.size(), 1u);
}

// If a nonce were used twice under one key, both codes and so the key's hash could be computed.
TEST_P(FarMac, AnEngineThatBeginsAgainHasAnotherKeyAndItsMessagesReplaceThoseBefore) {
  const std::vector<Sent> before{sent(), sent()};
  deliver(before[0]);
  FarGroup& sender = world_.group(0);
  sender.end();
  FarGroup::Epoch again = world_.of(2, 0);
  again.now_ns = 2;
  sender.begin(again);
  const Sent after = sent();
  EXPECT_EQ(after.header.number, before[0].header.number);
  EXPECT_NE(std::memcmp(after.header.mac, before[0].header.mac, sizeof(after.header.mac)), 0);
  deliver(after);
  EXPECT_EQ(taken_.size(), 2u);
  deliver(before[1]);
  EXPECT_EQ(drops(Drop::kNumber), 1u);
  EXPECT_EQ(taken_.size(), 2u);
}

TEST_P(FarMac, AGreetingAndAnotherMessageOfThatNumberHaveOtherNonces) {
  const MacKey key({1, 2}, 100, 101, 1);
  FarHeader greeting{};
  greeting.type = FarType::kGreeting;
  greeting.number = 1;
  FarHeader other = greeting;
  other.type = FarType::kCredit;
  key.sign(greeting, {});
  key.sign(other, {});
  EXPECT_TRUE(key.verify(greeting, {}));
  EXPECT_NE(std::memcmp(greeting.mac, other.mac, sizeof(other.mac)), 0);
  EXPECT_FALSE(MacKey({1, 2}, 101, 100, 1).verify(greeting, {})) << "the other direction";
  EXPECT_FALSE(MacKey({1, 3}, 100, 101, 1).verify(greeting, {})) << "another epoch";
}

TEST(FarSequence, AnEngineThatBeginsAgainCountsAgain) {
  Sequence sequence;
  EXPECT_TRUE(sequence.take(5, 1, 1));
  EXPECT_TRUE(sequence.take(5, 3, 10));
  EXPECT_EQ(sequence.gap_since_ns(), 10u);
  EXPECT_TRUE(sequence.take(6, 1, 11));
  EXPECT_EQ(sequence.gap_since_ns(), 0u);
  EXPECT_FALSE(sequence.take(5, 2, 12)) << "of its predecessor";
  EXPECT_TRUE(sequence.take(6, 2, 13));
  EXPECT_FALSE(sequence.take(6, 4 + Sequence::kMostAhead, 14));
  EXPECT_TRUE(sequence.take(6, 3 + Sequence::kMostAhead, 14));
  EXPECT_TRUE(sequence.take(6, 4, 15));
  EXPECT_EQ(sequence.gap_since_ns(), 14u);
  EXPECT_TRUE(sequence.take(6, 3, 16));
  EXPECT_EQ(sequence.gap_since_ns(), 16u) << "another one is missing";
}

}  // namespace
}  // namespace epd::far
