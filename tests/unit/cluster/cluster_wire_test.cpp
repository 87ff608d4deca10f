// Messages about groups that span nodes: what is said is what is heard, and what nobody may say is refused.
#include "membership.pb.h"
#include "wire.h"

#include <gtest/gtest.h>
#include <random>

namespace epd::cluster {
namespace {

namespace wire = v1::membership;

constexpr std::size_t kMost = std::size_t{1} << 20;

// Fills a struct with random values within the limits of its fields.
class Filler {
 public:
  explicit Filler(std::uint64_t seed) : random_(seed) {}
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  template <typename Value>
  Value value() {
    Value v{};
    fields(*this, v);
    return v;
  }
  // Takes that alternative for its choice; false: there is none.
  template <typename Value>
  bool value(Value& v, std::size_t alternative) {
    wanted_ = alternative;
    found_ = false;
    fields(*this, v);
    return found_;
  }

  template <Kind K, typename Value, typename Low, typename Most>
  void number(std::uint32_t, const char*, Value& value, Low low, Most most) {
    const std::uint64_t span = static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(low);
    const std::uint64_t some = below(4) == 0 ? span : random_() >> below(64);
    value = static_cast<Value>(static_cast<std::uint64_t>(low) + (span == kAny ? some : some % (span + 1)));
  }
  void text(std::uint32_t, const char*, std::string& value, std::size_t most) {
    value.assign(below(std::min<std::size_t>(most, 40) + 1), ' ');
    for (char& c : value) c = static_cast<char>(0x20 + below(0x5f));
  }
  template <std::size_t N>
  void text(std::uint32_t number, const char* name, char (&value)[N], std::size_t) {
    std::string some;
    text(number, name, some, N - 1);
    abi::set_text(value, some.data(), some.size());
  }
  void bytes(std::uint32_t number, const char* name, std::string& value, std::size_t most) {
    text(number, name, value, most);
    for (char& c : value) c = static_cast<char>(c ^ below(2) << 7);
  }
  template <typename Value>
  void part(std::uint32_t, const char*, Value& value) {
    fields(*this, value);
  }
  template <typename Value>
  void list(std::uint32_t, const char*, std::vector<Value>& values, std::size_t) {
    values.resize(below(4));
    for (Value& value : values) fields(*this, value);
  }
  template <Kind K, typename Value>
  void numbers(std::uint32_t n, const char* name, std::vector<Value>& values, std::size_t,
               std::uint64_t most) {
    values.resize(below(4));
    for (Value& value : values) number<K>(n, name, value, 0, most);
  }
  template <typename Value, typename Variant>
  void choice(std::uint32_t, const char*, Variant& variant) {
    if (wanted_-- != 0) return;
    const std::size_t rest =
        std::exchange(wanted_, below(std::variant_size_v<Action> - 1));  // of what is in it
    fields(*this, variant.template emplace<Value>());
    wanted_ = rest;
    found_ = true;
  }
  void chosen(const char*, const char*) {}
  void judge(GroupDescription& v) {
    v.shape = some_shape();
    v.ranks.resize(v.shape.num_ranks);
    for (std::uint32_t i = 0; i < v.ranks.size(); ++i) v.ranks[i].rank = i;
    for (MemberDescription& member : v.members) member.rank %= v.shape.num_ranks;
  }
  void judge(AcquireMemory& v) {
    v.shape = some_shape();
    v.rank %= v.shape.num_ranks;
  }

 private:
  abi::GroupShape some_shape() {
    const auto ranks = static_cast<std::uint32_t>(1 + below(4));
    abi::GroupShape v{ranks, ranks * 2, 16, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt64};
    v.policy = abi::LossPolicy::kDegrade;
    v.num_more_formats = static_cast<std::uint32_t>(below(2));
    if (v.num_more_formats > 0) v.more_formats[0].payload = abi::Payload::kFp8Cast;
    return v;
  }

  std::mt19937_64 random_;
  std::size_t wanted_ = 0;
  bool found_ = false;
};

std::string bytes_of(const ToCoordinator& message) {
  return encode(message, kMost);
}
std::string bytes_of(const ToAgent& message) {
  return encode(message);
}
void hear(const std::string& bytes, Result<ToCoordinator>& heard) {
  heard = decode_to_coordinator(bytes);
}
void hear(const std::string& bytes, Result<ToAgent>& heard) {
  heard = decode_to_agent(bytes);
}
// As protobuf's own code has it, from the same .proto.
wire::ToCoordinator parsed(const ToCoordinator& message) {
  wire::ToCoordinator m;
  EXPECT_TRUE(m.ParseFromString(bytes_of(message)));
  return m;
}
wire::ToAgent parsed(const ToAgent& message) {
  wire::ToAgent m;
  EXPECT_TRUE(m.ParseFromString(bytes_of(message)));
  return m;
}

template <typename Message>
Result<Message> heard(const std::string& bytes) {
  Result<Message> message = Message();
  hear(bytes, message);
  return message;
}

// A message is heard as it was said, also when protobuf's own code has read and written it.
template <typename Message>
void expect_round_trip(const Message& message) {
  auto other = parsed(message);
  other.DiscardUnknownFields();
  for (const std::string& bytes : {bytes_of(message), other.SerializeAsString()}) {
    const Result<Message> again = heard<Message>(bytes);
    ASSERT_TRUE(again.ok()) << again.status().to_string() << "\n" << other.ShortDebugString();
    EXPECT_TRUE(bytes_of(again.value()) == bytes_of(message)) << other.ShortDebugString();
  }
}

// Each alternative of what a node tells, or is told, in turn.
template <typename Body, typename Do>
void each_alternative(Filler& filler, const Do& act) {
  Body body;
  for (std::size_t i = 0; filler.value(body, i); ++i) act(body);
}

TEST(ClusterWire, WhatIsSaidIsHeard) {
  Filler filler(1);
  for (int round = 0; round < 50; ++round) {
    each_alternative<Event>(filler, [&](const Event& event) {
      expect_round_trip(ToCoordinator{filler.below(99), Told{event}});
    });
    each_alternative<Action>(filler, [&](const Action& action) {
      expect_round_trip(ToAgent{filler.below(99), 7, Order{filler.below(99), action}});
    });
    each_alternative<ToCoordinator>(filler, [](const ToCoordinator& message) { expect_round_trip(message); });
    each_alternative<ToAgent>(filler, [](const ToAgent& message) { expect_round_trip(message); });
  }
}

// A later daemon says more, and leaves out what is 0.
TEST(ClusterWire, FieldsOfALaterVersionAreLeftOut) {
  const SessionClosed closed{{0, 7}, "died"};
  const std::string bytes = bytes_of(ToCoordinator{1, Told{closed}}) +
                            "\xf8\x01\x05\xfa\x01\x03"
                            "abc";
  const auto message = heard<ToCoordinator>(bytes);
  ASSERT_TRUE(message.ok()) << message.status().to_string();
  EXPECT_EQ(bytes_of(message.value()), bytes_of(ToCoordinator{1, Told{closed}}));
  const auto empty = heard<ToAgent>(std::string("\x2a\x02\x12\x00", 4));
  EXPECT_EQ(empty.status().message(),
            "order.action.what is none that is known; allowed: an action of a node");
}

// Reports that don't fit are left out; the groups end if the coordinator is another one.
TEST(ClusterWire, ReportsThatDoNotFitAreLeftOut) {
  Attach attach;
  attach.devices = {{"host:0", {}}};
  attach.groups.resize(50, Filler(6).value<GroupReport>());
  const std::size_t all = bytes_of(ToCoordinator{1, attach}).size();
  for (const std::size_t most : {all, all - 1, all / 2, all / 50, std::size_t{40}}) {
    const std::string bytes = encode(ToCoordinator{1, attach}, most);
    EXPECT_LE(bytes.size(), most);
    const Attach fits = std::get<Attach>(heard<ToCoordinator>(bytes).value().body);
    EXPECT_EQ(fits.devices.size(), 1u);
    EXPECT_GE(fits.groups.size() + 2, most * 50 / all) << most;
  }
}

TEST(ClusterWire, Extremes) {
  constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  SendBreak broken{{1, 1023}, {kNever, abi::kLastEpoch, kNever, 1, StatusCode::kInternal, -1, {}}, {}, true};
  broken.group = {kNever, ~0u, std::string(abi::kMaxGroupName, 'g')};
  expect_round_trip(ToAgent{kMaxTerm, 1u << 30, Order{kNever, broken}});
  JoinRequest join = Filler(2).value<JoinRequest>();
  join.join.rank = std::numeric_limits<std::int32_t>::min();
  join.join.priority = std::numeric_limits<std::int32_t>::max();
  join.join.shape.num_ranks = 0;  // the registry refuses it to the client
  join.join.shape.payload = static_cast<abi::Payload>(~0u);
  join.join.group[0] = static_cast<char>(0xff);
  join.max_groups.limit = kNever;
  expect_round_trip(ToCoordinator{0, Told{join}});
}

TEST(ClusterWire, TextsAreCutAndPrintable) {
  const ToCoordinator closed{1, Told{SessionClosed{{}, std::string(3000, 'x') + "\n"}}};
  const auto cut = heard<ToCoordinator>(bytes_of(closed));
  EXPECT_EQ(std::get<SessionClosed>(std::get<Told>(cut.value().body).event).how.size(), 1024u);
  const auto odd = heard<ToAgent>(bytes_of(ToAgent{1, 1, PutOut{"a\nb\xff"}}));
  EXPECT_EQ(std::get<PutOut>(odd.value().body).text, "a?b?");
}

template <typename Message, typename Change>
void expect_refused(const Message& message, const Change& change, const std::string& text) {
  auto sent = parsed(message);
  change(sent);
  const auto refused = heard<Message>(sent.SerializeAsString());
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << text;
  EXPECT_EQ(refused.status().message(), text);
}

TEST(ClusterWire, EventsAreJudged) {
  Filler random(3);
  const auto refused = [&](const Event& event, const auto& change, const std::string& text) {
    expect_refused(
        ToCoordinator{1, Told{event}}, [&](auto& m) { change(*m.mutable_told()->mutable_event()); }, text);
  };
  refused(
      random.value<BreakRequested>(),
      [](auto& e) { e.mutable_break_requested()->mutable_message()->set_cause(99); },
      "told.event.break_requested.message.cause is 99; allowed: 0 .. 13");
  refused(
      random.value<Broken>(), [](auto& e) { e.mutable_broken()->set_epoch(abi::kLastEpoch + 1); },
      "told.event.broken.epoch is " + std::to_string(abi::kLastEpoch + 1) + "; allowed: 0 .. " +
          std::to_string(abi::kLastEpoch));
  refused(
      random.value<PeerLost>(), [](auto& e) { e.mutable_peer_lost()->mutable_far()->set_device(1024); },
      "told.event.peer_lost.far.device is 1024; allowed: 0 .. 1023");
  refused(
      random.value<SessionClosed>(), [](auto& e) { e.mutable_session_closed()->set_how("a\nb"); },
      "told.event.session_closed.how is text with the byte 10; allowed: 32 .. 126");
  refused(
      random.value<GroupReady>(), [](auto& e) { e.mutable_group_ready()->set_text(std::string(512, 'x')); },
      "told.event.group_ready.text is of 512 characters; allowed: at most 511");
  refused(
      random.value<EngineUp>(), [](auto& e) { e.mutable_engine_up()->set_address(std::string(1025, 'x')); },
      "told.event.engine_up.address is of 1025 bytes; allowed: at most 1024");
  refused(
      random.value<MemoryAcquired>(), [](auto& e) { e.mutable_memory_acquired()->set_rank(1024); },
      "told.event.memory_acquired.rank is 1024; allowed: 0 .. 1023");
  refused(
      random.value<JoinRequest>(), [](auto& e) { e.mutable_join_request()->set_device_kind(2); },
      "told.event.join_request.device_kind is 2; allowed: 0 .. 1");
  refused(
      random.value<JoinRequest>(), [](auto& e) { e.mutable_join_request()->set_pid(-1); },
      "told.event.join_request.pid is -1; allowed: 0 .. 2147483647");
  refused(
      EngineDown{},
      [](auto& e) {
        for (int i = 0; i < 65'537; ++i) e.mutable_engine_down()->add_boards();
      },
      "told.event.engine_down.boards is a list of 65537; allowed: at most 65536");
  refused(
      random.value<Resumed>(), [](auto& e) { e.clear_what(); },
      "told.event.what is none that is known; allowed: an event of a node");
}

// A peer may send two alternatives of one choice. The first one does not stand for a choice within the
// second.
TEST(ClusterWire, EachChoiceIsMadeByItself) {
  wire::ToAgent two;
  two.mutable_coordinator_heartbeat();
  std::string bytes = two.SerializeAsString();
  two.mutable_order()->mutable_action();
  bytes += two.SerializeAsString();
  const auto refused = heard<ToAgent>(bytes);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.status().message().find("order.action."), 0u) << refused.status().message();
}

TEST(ClusterWire, MessagesAreJudged) {
  Filler random(4);
  expect_refused(
      ToCoordinator{1, Superseded{}}, [](auto& m) { m.set_term(kMaxTerm + 1); },
      "term is 281474976710657; allowed: 0 .. 281474976710656");
  expect_refused(
      ToCoordinator{1, Superseded{}}, [](auto& m) { m.clear_body(); },
      "body is none that is known; allowed: a message of an agent");
  expect_refused(
      ToAgent{1, 1, PutOut{}}, [](auto& m) { m.clear_body(); },
      "body is none that is known; allowed: a message of a coordinator");
  expect_refused(
      ToAgent{1, 1, PutOut{}}, [](auto& m) { m.set_number((1u << 30) + 1); },
      "number is 1073741825; allowed: 0 .. 1073741824");
  AcquireMemory memory = random.value<AcquireMemory>();
  memory.shape.num_ranks = memory.shape.num_experts = 4;
  expect_refused(
      ToAgent{1, 1, Order{0, memory}},
      [](auto& m) {
        m.mutable_order()->mutable_action()->mutable_acquire_memory()->mutable_shape()->set_hidden(100);
      },
      "order.action.acquire_memory.shape.hidden is 100; allowed: multiples of 8, 8 .. 16384");
  expect_refused(
      ToAgent{1, 1, Order{0, memory}},
      [](auto& m) { m.mutable_order()->mutable_action()->mutable_acquire_memory()->set_rank(4); },
      "order.action.acquire_memory.rank is 4; allowed: below num_ranks, which is 4");
  StartGroup start = random.value<StartGroup>();
  expect_refused(
      ToAgent{1, 1, Order{0, start}},
      [](auto& m) {
        m.mutable_order()->mutable_action()->mutable_start_group()->mutable_group()->clear_ranks();
      },
      "order.action.start_group.group.ranks is a list of 0; allowed: num_ranks, which is " +
          std::to_string(start.group.shape.num_ranks) + ", in their order");
}

// Any bytes are refused, or give a message that can be said again.
template <typename Message>
void mutate(Filler& random, const Message& message, int rounds) {
  const std::string good = bytes_of(message);
  for (int i = 0; i < rounds; ++i) {
    std::string bytes = good.substr(0, random.below(4) == 0 ? random.below(good.size()) : good.size());
    for (std::uint64_t n = 1 + random.below(4); n > 0 && !bytes.empty(); --n)
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    const Result<Message> again = heard<Message>(bytes);
    if (again.ok()) {
      expect_round_trip(again.value());
    } else {
      EXPECT_NE(again.status().message().find("; allowed: "), std::string::npos) << again.status().message();
    }
  }
}

TEST(ClusterWire, MutatedBytes) {
  Filler random(5);
  each_alternative<Event>(random, [&](const Event& event) {
    mutate(random, ToCoordinator{1, Told{event}}, 300);
  });
  each_alternative<Action>(random, [&](const Action& action) {
    mutate(random, ToAgent{1, 1, Order{1, action}}, 300);
  });
  mutate(random, ToCoordinator{1, random.value<Attach>()}, 3'000);
}

}  // namespace
}  // namespace epd::cluster
