// Messages about groups that span nodes: what is said is what is heard, and what nobody may say is refused.
#include "frames.h"
#include "membership_values.h"
#include "membership_wire.h"

#include <gtest/gtest.h>
#include <limits>

namespace epd::cluster {
namespace {

using namespace membership;
namespace wire = v1::membership;

template <typename T, typename Variant>
constexpr std::size_t index_of() {
  const auto of = []<typename... Ts>(std::variant<Ts...>*) {
    std::size_t index = 0;
    (void)((std::is_same_v<T, Ts> ? true : (++index, false)) || ...);
    return index;
  };
  return of(static_cast<Variant*>(nullptr));
}

// On the registry's own side alone.
bool has_message(const Event& event) {
  return !std::holds_alternative<NodeUp>(event) && !std::holds_alternative<NodeLost>(event);
}

template <typename Message>
auto over_the_wire(const Message& message) {
  auto sent = message_of(message);
  decltype(sent) received;
  EXPECT_TRUE(received.ParseFromString(sent.SerializeAsString()));
  return parse(received);
}

template <typename Message>
void expect_round_trip(const Message& message) {
  const Result<Message> heard = over_the_wire(message);
  ASSERT_TRUE(heard.ok()) << heard.status().to_string() << "\n" << message_of(message).ShortDebugString();
  EXPECT_TRUE(Same::of(message, heard.value())) << message_of(message).ShortDebugString();
}

TEST(ClusterWire, WhatIsSaidIsHeard) {
  Random random(1);
  for (int round = 0; round < 50; ++round) {
    for (std::size_t i = 0; i < std::variant_size_v<Event>; ++i) {
      const Event event = random.alternative<Event>(i);
      if (has_message(event)) expect_round_trip(ToCoordinator{random.below(99), Told{event}});
    }
    for (std::size_t i = 0; i < std::variant_size_v<Action>; ++i) {
      const Action action = random.alternative<Action>(i);
      expect_round_trip(ToAgent{random.below(99), 7, Order{random.below(99), action}});
    }
    using Said = decltype(ToCoordinator::body);
    for (std::size_t i = 0; i < std::variant_size_v<Said>; ++i) {
      if (i != index_of<Told, Said>()) expect_round_trip(ToCoordinator{5, random.alternative<Said>(i)});
    }
    using Ordered = decltype(ToAgent::body);
    for (std::size_t i = 0; i < std::variant_size_v<Ordered>; ++i) {
      if (i != index_of<Order, Ordered>()) expect_round_trip(ToAgent{5, 3, random.alternative<Ordered>(i)});
    }
  }
}

TEST(ClusterWire, Extremes) {
  constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  SendBreak broken{{1, 1023}, {kNever, abi::kLastEpoch, kNever, 1, StatusCode::kInternal, -1, {}}, {}, true};
  broken.group = {kNever, ~0u, std::string(abi::kMaxGroupName, 'g')};
  expect_round_trip(ToAgent{kMaxTerm, 1u << 30, Order{kNever, broken}});
  JoinRequest join = Random(2).value<JoinRequest>();
  join.join.rank = std::numeric_limits<std::int32_t>::min();
  join.join.priority = std::numeric_limits<std::int32_t>::max();
  join.join.shape.num_ranks = 0;  // the registry refuses it to the client
  join.join.shape.payload = static_cast<abi::Payload>(~0u);
  join.join.group[0] = static_cast<char>(0xff);
  join.max_groups.limit = kNever;
  expect_round_trip(ToCoordinator{0, Told{join}});
}

TEST(ClusterWire, TextsAreCutAndPrintable) {
  const auto heard = over_the_wire(ToCoordinator{1, Told{SessionClosed{{}, std::string(3000, 'x') + "\n"}}});
  EXPECT_EQ(std::get<SessionClosed>(std::get<Told>(heard.value().body).event).how.size(), 1024u);
  const auto odd = over_the_wire(ToAgent{1, 1, PutOut{"a\nb\xff"}});
  EXPECT_EQ(std::get<PutOut>(odd.value().body).text, "a?b?");
}

template <typename Message, typename Change>
void expect_refused(const Message& message, const Change& change, const std::string& text) {
  auto sent = message_of(message);
  change(sent);
  const auto heard = parse(sent);
  EXPECT_EQ(heard.status().code(), StatusCode::kInvalidArgument) << text;
  EXPECT_EQ(heard.status().message(), text);
}

TEST(ClusterWire, EventsAreJudged) {
  Random random(3);
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
      random.value<JoinRequest>(),
      [](auto& e) { e.mutable_join_request()->mutable_join()->add_bindings()->set_region(19); },
      "told.event.join_request.join.bindings.region is 19; allowed: 0 .. 18");
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

TEST(ClusterWire, MessagesAreJudged) {
  Random random(4);
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

// Whatever the bytes are: refused, or a message that can be said again.
template <typename Message>
void mutate(Random& random, const Message& message, int rounds) {
  const std::string good = message_of(message).SerializeAsString();
  for (int i = 0; i < rounds; ++i) {
    std::string bytes = good;
    for (std::uint64_t n = 1 + random.below(4); n > 0 && !bytes.empty(); --n)
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    decltype(message_of(message)) received;
    if (!received.ParseFromString(bytes)) continue;
    const Result<Message> heard = parse(received);
    if (heard.ok()) {
      expect_round_trip(heard.value());
    } else {
      EXPECT_NE(heard.status().message().find("; allowed: "), std::string::npos) << heard.status().message();
    }
  }
}

TEST(ClusterWire, MutatedBytes) {
  Random random(5);
  for (std::size_t i = 0; i < std::variant_size_v<Event>; ++i) {
    const Event event = random.alternative<Event>(i);
    if (has_message(event)) mutate(random, ToCoordinator{1, Told{event}}, 300);
  }
  for (std::size_t i = 0; i < std::variant_size_v<Action>; ++i) {
    const Action action = random.alternative<Action>(i);
    mutate(random, ToAgent{1, 1, Order{1, action}}, 300);
  }
  mutate(random, ToCoordinator{1, random.value<Attach>()}, 3'000);
}

}  // namespace
}  // namespace epd::cluster
