// Hellos of two engines, whose messages the test carries, or does not.
#include "far_side.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>

namespace epd::test {
namespace {

using engine::FarSide;

constexpr std::uint64_t kGroup = std::uint64_t{1} << 63 | 3;

class Mailbox final : public far::Port {
 public:
  bool send(std::unique_ptr<far::Message>& message) override {
    sent.push_back(std::move(message));
    return true;
  }
  void release(const far::Body&) override { ++released; }

  std::deque<std::unique_ptr<far::Message>> sent;
  int released = 0;
};

// One rank on each of two nodes.
struct End {
  explicit End(std::uint32_t node, std::uint64_t window_bytes = 1 << 20,
               abi::FarCheck check = abi::FarCheck::kCrc) {
    abi::GroupBegin begin{};
    begin.group_id = kGroup;
    begin.node = node;
    begin.shape = abi::GroupShape{2, 4, 8, 128, 2, 2, {}, {}, {}};
    transport::NetworkOptions network;
    network.batch_bytes = 4096;
    network.window_bytes = window_bytes;
    network.check = check;
    side = std::make_unique<FarSide>(begin, network, node, &port, nullptr);
    for (std::uint32_t rank = 0; rank < 2; ++rank) side->place({kGroup, rank, 5, 1, rank + 1});
    side->group(5);
    own = engine::far_engine_id(node, 5);
  }
  void begin(std::uint64_t epoch, std::uint64_t key = 7) {
    const std::uint64_t words[2] = {key, epoch};
    side->end();
    side->set_epoch(epoch, words);
    side->begin(epoch, 0, {}, ++begins);
  }
  // Its turn; what it says goes to the other, or is lost.
  int say(End& other, std::uint64_t now_ns, bool lost = false) {
    side->step(now_ns);
    int count = 0;
    for (; !port.sent.empty(); port.sent.pop_front(), ++count) {
      const far::Message& message = *port.sent.front();
      EXPECT_EQ(message.engine, other.own);
      if (lost) continue;
      other.side->received(own, std::as_bytes(std::span(&message.header, 1)),
                           {message.body.data(), message.header.body_bytes, 1});
    }
    return count;
  }

  Mailbox port;
  std::unique_ptr<FarSide> side;
  far::EngineId own = 0;
  std::uint64_t begins = 0;
};

TEST(FarSide, BothAreGreetedWhoeverIsFirst) {
  End a(1), b(2);
  a.begin(1);
  EXPECT_EQ(a.say(b, 1), 1);  // b is not there yet
  EXPECT_EQ(b.port.released, 1);
  EXPECT_FALSE(a.side->greeted());
  EXPECT_EQ(a.side->awaited(), b.own);
  EXPECT_EQ(a.side->next_look_ns(), 1 + FarSide::kGreetingNs);
  EXPECT_EQ(a.say(b, 2), 0);  // not before its time
  b.begin(1);
  EXPECT_EQ(b.say(a, 3), 1);
  EXPECT_TRUE(a.side->greeted());
  EXPECT_FALSE(b.side->greeted());
  EXPECT_EQ(a.say(b, 4), 1);  // b has asked
  EXPECT_TRUE(b.side->greeted());
  // And that is all.
  EXPECT_EQ(b.say(a, 5) + a.say(b, 6) + b.say(a, 7), 0);
  EXPECT_EQ(a.say(b, 10 * FarSide::kGreetingNs) + b.say(a, 10 * FarSide::kGreetingNs), 0);
}

TEST(FarSide, WhoIsPastItAnswersAgain) {
  End a(1), b(2);
  a.begin(1);
  b.begin(1);
  a.say(b, 1);
  EXPECT_EQ(b.say(a, 2, true), 1);  // lost: a does not hear it
  EXPECT_TRUE(b.side->greeted());
  EXPECT_EQ(b.say(a, 3), 0);
  EXPECT_EQ(a.say(b, 1 + FarSide::kGreetingNs), 1);
  EXPECT_EQ(b.say(a, 4), 1);
  EXPECT_TRUE(a.side->greeted());
  EXPECT_EQ(a.say(b, 5), 0);
}

TEST(FarSide, HellosOfOtherKeysAndEpochsAreNotHeard) {
  End a(1), b(2);
  a.begin(2);
  b.begin(1);
  EXPECT_EQ(b.say(a, 1), 1);
  EXPECT_FALSE(a.side->greeted());
  EXPECT_EQ(a.side->group(5).drops().of(far::Drop::kEpoch), 1u);
  b.begin(2, 8);
  EXPECT_EQ(b.say(a, 2), 1);
  EXPECT_FALSE(a.side->greeted());
  EXPECT_EQ(a.side->group(5).drops().of(far::Drop::kToken), 1u);
  EXPECT_FALSE(a.side->difference().has_value());
  b.begin(2);
  EXPECT_EQ(b.say(a, 3), 1);
  EXPECT_TRUE(a.side->greeted());
  EXPECT_EQ(a.port.released, 3);
  a.begin(3);
  EXPECT_FALSE(a.side->greeted());
}

TEST(FarSide, OtherWindowsAreADifference) {
  End a(1), b(2, 2 << 20);
  a.begin(1);
  b.begin(1);
  a.say(b, 1);
  b.say(a, 2);
  for (const End* end : {&a, &b}) {
    ASSERT_TRUE(end->side->difference().has_value());
    EXPECT_EQ(end->side->difference()->what,
              end == &a ? "shape, network.batch_bytes (here 4096) or network.window_bytes (here 1048576)"
                        : "shape, network.batch_bytes (here 4096) or network.window_bytes (here 2097152)");
    EXPECT_FALSE(end->side->greeted());
  }
}

TEST(FarSide, AnotherCheckIsADifference) {
  End a(1, 1 << 20, abi::FarCheck::kCrc), b(2, 1 << 20, abi::FarCheck::kMac);
  a.begin(1);
  b.begin(1);
  a.say(b, 1);
  b.say(a, 2);
  ASSERT_TRUE(a.side->difference().has_value());
  EXPECT_EQ(a.side->difference()->what, "network.check (here \"crc\", there \"mac\")");
  EXPECT_FALSE(b.side->difference().has_value()) << "a can't prove who it is";
  EXPECT_EQ(b.side->group(5).drops().of(far::Drop::kChecksum), 1u);
}

// Any reader of the network can make one, and had groups refused.
TEST(FarSide, AForgedHelloWithAnotherCheckIsNoDifference) {
  End a(1, 1 << 20, abi::FarCheck::kMac), b(2, 1 << 20, abi::FarCheck::kMac);
  a.begin(1);
  b.begin(1);
  a.side->step(1);
  far::Message forged;
  forged.header = a.port.sent.front()->header;
  forged.body = far::Buffer(forged.header.body_bytes);
  std::memcpy(forged.body.data(), a.port.sent.front()->body.data(), forged.header.body_bytes);
  abi::FarGreeting words;
  std::memcpy(&words, forged.body.data(), sizeof(words));
  words.check = static_cast<std::uint64_t>(abi::FarCheck::kCrc);
  std::memcpy(forged.body.data(), &words, sizeof(words));
  far::seal(forged.header, forged.bytes(), abi::FarCheck::kCrc);
  b.side->received(a.own, std::as_bytes(std::span(&forged.header, 1)),
                   {forged.body.data(), forged.header.body_bytes, 1});
  EXPECT_FALSE(b.side->difference().has_value());
  EXPECT_EQ(b.side->group(5).drops().of(far::Drop::kChecksum), 1u);
  a.say(b, 1);
  EXPECT_TRUE(b.side->greeted());
}

// A greeting is repeated until it has come as it was sent.
TEST(FarSide, ASpoiledHelloIsNotHeard) {
  for (const abi::FarCheck check : {abi::FarCheck::kHeaders, abi::FarCheck::kCrc, abi::FarCheck::kMac}) {
    SCOPED_TRACE(abi::far_check_name(check));
    End a(1, 1 << 20, check), b(2, 1 << 20, check);
    a.begin(1);
    b.begin(1);
    a.side->step(1);
    ASSERT_EQ(a.port.sent.size(), 1u);
    far::Message& message = *a.port.sent.front();
    const auto hear = [&] {
      b.side->received(a.own, std::as_bytes(std::span(&message.header, 1)),
                       {message.body.data(), message.header.body_bytes, 1});
      return b.side->greeted();
    };
    for (std::size_t at = 0; at < message.header.body_bytes; ++at) {
      message.body.data()[at] ^= std::byte{1};
      EXPECT_FALSE(hear()) << "byte " << at;
      message.body.data()[at] ^= std::byte{1};
    }
    // Another message, with checksums that anybody can make.
    ++message.header.number;
    far::seal(message.header, message.bytes(), check);
    EXPECT_EQ(hear(), check != abi::FarCheck::kMac);
    --message.header.number;
    far::seal(message.header, message.bytes(), check);
    EXPECT_TRUE(b.side->take_faults().empty());
    EXPECT_TRUE(hear());
  }
}

// It was served here and could not be mapped: what the supervisor told is the same everywhere.
TEST(FarSide, ARankThatIsRefusedIsNoDifference) {
  End a(1), b(2);
  const std::uint64_t words[2] = {7, 1};
  const std::uint8_t masked[] = {1, 0};
  a.side->set_epoch(1, words);
  a.side->begin(1, 0, masked, 1);
  b.begin(1);
  a.say(b, 1);
  b.say(a, 2);
  EXPECT_TRUE(a.side->greeted());
  EXPECT_TRUE(b.side->greeted());
}

}  // namespace
}  // namespace epd::test
