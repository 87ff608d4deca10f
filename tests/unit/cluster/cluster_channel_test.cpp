// The channel between two daemons: order, loss, duplicates, limits; and random lives from a seed.
#include "channel.h"

#include <gtest/gtest.h>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kHeartbeatNs = 100 * kMs;

Channel::Ends ends_of(char own, char other, std::uint64_t term = 7) {
  return {term, std::string(16, own), std::string(16, other)};
}

class ChannelPair : public testing::Test {
 protected:
  void open(std::uint64_t now = 0) {
    const std::uint64_t of_a = a.received();
    ASSERT_TRUE(b.opened(of_a, now).ok());
    ASSERT_TRUE(a.opened(b.received(), now).ok());
  }
  // Delivers everything that `from` sends at once.
  std::vector<std::string> carry(Channel& from, Channel& to, std::uint64_t now = 0) {
    std::vector<std::string> payloads;
    while (auto envelope = from.next(now)) {
      auto got = to.receive(std::move(*envelope));
      EXPECT_TRUE(got.ok()) << got.status().to_string();
      if (got.ok() && got.value()) payloads.push_back(*got.value());
    }
    return payloads;
  }

  Channel a{ends_of(1, 2), kHeartbeatNs};
  Channel b{ends_of(2, 1), kHeartbeatNs};
};

using Texts = std::vector<std::string>;

TEST_F(ChannelPair, MessagesArriveInOrderBothWays) {
  ASSERT_TRUE(a.send("early").ok());  // before any stream
  open();
  ASSERT_TRUE(a.send("one").ok());
  ASSERT_TRUE(b.send("back").ok());
  EXPECT_EQ(carry(a, b), (Texts{"early", "one"}));
  EXPECT_EQ(carry(b, a), (Texts{"back"}));
  EXPECT_EQ(a.kept_bytes(), 0u) << "b's message has acknowledged both";
}

TEST_F(ChannelPair, WhatAStreamLostIsSentAgainOnce) {
  open();
  for (const char* text : {"one", "two", "three"}) ASSERT_TRUE(a.send(text).ok());
  ASSERT_TRUE(b.receive(*a.next(0)).ok());
  ASSERT_TRUE(a.next(0).has_value());  // "two" leaves and is lost
  a.closed();
  b.closed();
  EXPECT_FALSE(a.next(kHeartbeatNs).has_value()) << "no stream";
  open();
  EXPECT_EQ(carry(a, b), (Texts{"two", "three"}));
}

TEST_F(ChannelPair, WhatComesTwiceIsDeliveredOnce) {
  open();
  ASSERT_TRUE(a.send("one").ok());
  const v1::ChannelMessage first = *a.next(0);
  EXPECT_EQ(*b.receive(v1::ChannelMessage(first)).value(), "one");
  const auto again = b.receive(v1::ChannelMessage(first));
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(again.value().has_value());
}

TEST_F(ChannelPair, HeartbeatsComeWhenNothingElseHasBeenSent) {
  open(0);
  EXPECT_FALSE(a.next(kHeartbeatNs - 1).has_value());
  EXPECT_EQ(a.next_due_ns(), kHeartbeatNs);
  const auto beat = a.next(kHeartbeatNs);
  ASSERT_TRUE(beat.has_value());
  EXPECT_EQ(beat->number(), 0u);
  EXPECT_TRUE(beat->payload().empty());
  EXPECT_FALSE(a.next(kHeartbeatNs + 1).has_value());
  ASSERT_TRUE(a.send("one").ok());
  EXPECT_EQ(a.next_due_ns(), 0u);
  ASSERT_TRUE(a.next(kHeartbeatNs + 50 * kMs).has_value());
  EXPECT_EQ(a.next_due_ns(), 2 * kHeartbeatNs + 50 * kMs) << "a message is a heartbeat too";
}

TEST_F(ChannelPair, AHeartbeatAcknowledges) {
  open();
  ASSERT_TRUE(a.send("one").ok());
  carry(a, b);
  EXPECT_EQ(a.kept_bytes(), 3u);
  ASSERT_TRUE(a.receive(*b.next(kHeartbeatNs)).ok());
  EXPECT_EQ(a.kept_bytes(), 0u);
}

TEST_F(ChannelPair, TooMuchThatIsNotAcknowledgedEndsIt) {
  const std::string piece(Channel::kMaxKeptBytes / 4, 'x');
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(a.send(piece).ok());
  const Status full = a.send("y");
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find(std::to_string(Channel::kMaxKeptBytes)), std::string::npos);
  EXPECT_TRUE(a.given_up());
  open();
  EXPECT_FALSE(a.next(kHeartbeatNs).has_value());
  EXPECT_FALSE(a.send("z").ok());
}

TEST_F(ChannelPair, IllegalMessagesChangeNothing) {
  open();
  ASSERT_TRUE(a.send("one").ok());
  const v1::ChannelMessage good = *a.next(0);
  const auto refused = [&](auto change, const char* text) {
    v1::ChannelMessage bad = good;
    change(bad);
    const auto result = b.receive(std::move(bad));
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(result.status().message().find(text), std::string::npos) << result.status().message();
  };
  refused([](v1::ChannelMessage& e) { e.set_term(6); }, "term is 6; allowed: 7");
  refused([](v1::ChannelMessage& e) { e.set_boot_id(std::string(16, 9)); }, "another daemon");
  refused([](v1::ChannelMessage& e) { e.set_number(2); }, "message 2 follows message 0");
  refused([](v1::ChannelMessage& e) { e.set_number(~0ull); }, "follows message 0");
  refused([](v1::ChannelMessage& e) { e.set_acknowledged(1); }, "the last that was sent is 0");
  refused([](v1::ChannelMessage& e) { e.set_number(0); }, "3 bytes of payload");
  EXPECT_EQ(*b.receive(v1::ChannelMessage(good)).value(), "one");
}

TEST_F(ChannelPair, AnotherChannelIsNotResumed) {
  open();
  ASSERT_TRUE(a.send("one").ok());
  carry(a, b);
  ASSERT_TRUE(a.receive(*b.next(kHeartbeatNs)).ok());
  EXPECT_EQ(a.opened(0, 0).code(), StatusCode::kInvalidArgument) << "it had received one";
  EXPECT_EQ(a.opened(2, 0).code(), StatusCode::kInvalidArgument) << "there is no second one";
  EXPECT_TRUE(a.opened(1, 0).ok());
}

// Two ends and the streams between them. A stream is opened by the left end; the right end learns of it by
// what lies in it, and may still believe in an older one. Each direction delivers a prefix of what was
// written.
class RandomLife {
 public:
  explicit RandomLife(std::uint64_t seed) : random_(seed) {}

  void run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    // In the end a stream that stays: everything arrives.
    reopen();
    for (int i = 0; i < 10'000 && (said_[0] != heard_[1] || said_[1] != heard_[0]); ++i) {
      now_ += kHeartbeatNs / 4;
      pump();
    }
    EXPECT_EQ(heard_[1], said_[0]);
    EXPECT_EQ(heard_[0], said_[1]);
  }

 private:
  // The items that travel: the two openings, then envelopes.
  struct Item {
    std::optional<v1::ChannelMessage> envelope;
    std::uint64_t received = 0;  // of an opening
  };
  struct Stream {
    std::deque<Item> wire[2];  // [0]: from the left end
    bool cut = false;          // nothing that is written from now on arrives
    bool greeted = false;      // the right end has answered the opening
  };

  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  void step() {
    now_ += below(kHeartbeatNs / 10);
    switch (below(10)) {
      case 0:
      case 1:
      case 2: say(0); break;
      case 3:
      case 4: say(1); break;
      case 5:
      case 6:
      case 7: pump(); break;
      case 8:
        if (below(4) == 0) break_stream();
        break;
      default:
        if (below(6) == 0) reopen();
    }
  }

  void say(int end) {
    std::string text = std::to_string(end) + ":" + std::to_string(said_[end].size());
    ASSERT_TRUE(ends_[end].send(text).ok());
    said_[end].push_back(std::move(text));
  }

  // A part of what is under way arrives, nothing that follows; each end notices it or continues to write.
  void break_stream() {
    stream_.cut = true;
    for (auto& wire : stream_.wire) wire.resize(below(wire.size() + 1));
    if (below(2) == 0) ends_[0].closed();
    if (below(2) == 0) ends_[1].closed();
  }

  // The left end opens the stream again. The right end believes in the stream before until it reads the
  // opening.
  void reopen() {
    ends_[0].closed();
    stream_ = {};
    stream_.wire[0].push_back({std::nullopt, ends_[0].received()});
  }

  void pump() {
    for (int end = 0; end < 2; ++end) {
      const bool arrives = !stream_.cut && (end == 0 || stream_.greeted);
      while (auto envelope = ends_[end].next(now_)) {
        if (arrives) stream_.wire[end].push_back({std::move(envelope), 0});
      }
    }
    for (int end = 0; end < 2; ++end) {
      std::deque<Item>& wire = stream_.wire[end];
      for (std::size_t left = below(2) == 0 ? wire.size() : below(wire.size() + 1); left > 0; --left) {
        Item item = std::move(wire.front());
        wire.pop_front();
        deliver(1 - end, item);
      }
    }
  }

  void deliver(int to, const Item& item) {
    if (!item.envelope) {
      if (to == 1) {
        ends_[1].closed();
        ASSERT_TRUE(ends_[1].opened(item.received, now_).ok());
        stream_.greeted = true;
        if (!stream_.cut) stream_.wire[1].push_back({std::nullopt, ends_[1].received()});
      } else {
        ASSERT_TRUE(ends_[0].opened(item.received, now_).ok());
      }
      return;
    }
    if (!ends_[to].open()) return;  // it has noticed the end of the stream
    auto got = ends_[to].receive(v1::ChannelMessage(*item.envelope));
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    if (got.value()) heard_[to].push_back(*got.value());
    ASSERT_LE(heard_[to].size(), said_[1 - to].size());
    if (got.value()) {
      ASSERT_EQ(heard_[to].back(), said_[1 - to][heard_[to].size() - 1]);
    }
  }

  std::mt19937_64 random_;
  std::uint64_t now_ = 0;
  Channel ends_[2] = {Channel(ends_of(1, 2), kHeartbeatNs), Channel(ends_of(2, 1), kHeartbeatNs)};
  Stream stream_;
  Texts said_[2];
  Texts heard_[2];
};

TEST(ChannelLife, RandomStreamsLoseAndRepeatNothing) {
  const char* given = std::getenv("EPD_TEST_SEED");
  const std::uint64_t first = given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
  for (std::uint64_t seed = first; seed < first + 500 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomLife(seed).run(400);
  }
}

}  // namespace
}  // namespace epd::cluster
