// The proxy alone: connections that follow each other, rings without room, messages that are refused.
#include "far_proxy.h"
#include "support/in_process_transport.h"
#include "wrapped_transport.h"

#include <gtest/gtest.h>

#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace epd::test {
namespace {

using engine::FarProxy;

constexpr far::EngineId kA = 1, kB = 2;

transport::Limits limits() {
  transport::Limits limits;
  limits.max_body_bytes = 4096;
  return limits;
}

bool comes(const std::function<bool()>& condition) {
  for (int i = 0; i < 50'000; ++i) {
    if (condition()) return true;
    ::usleep(100);
  }
  return false;
}

std::unique_ptr<far::Message> message_to(far::EngineId engine, std::uint64_t number, std::size_t bytes = 8) {
  auto message = std::make_unique<far::Message>();
  message->engine = engine;
  message->header.time_ns = number;
  message->header.body_bytes = static_cast<std::uint32_t>(bytes);
  message->body = far::Buffer(bytes);
  return message;
}

std::uint64_t number_of(const FarProxy::Event& event) {
  abi::FarHeader header{};
  std::memcpy(&header, event.header.bytes().data(), sizeof(header));
  return header.time_ns;
}

// A transport that lets the test see and hold up some calls.
class Watched final : public WrappedTransport {
 public:
  struct Calls {
    std::atomic<bool> held{false};     // progress() waits
    std::atomic<bool> waiting{false};  // it does
    std::atomic<std::uint64_t> arms{0};
  };
  Watched(std::unique_ptr<transport::Transport> inner, Calls& calls)
      : WrappedTransport(std::move(inner)), calls_(calls) {}

  std::size_t progress(std::span<transport::Event> events) override {
    while (calls_.held.load()) {
      calls_.waiting = true;
      ::usleep(100);
    }
    calls_.waiting = false;
    return inner().progress(events);
  }
  bool arm() override {
    ++calls_.arms;
    return inner().arm();
  }

 private:
  Calls& calls_;
};

class Proxies : public ::testing::Test {
 protected:
  std::unique_ptr<FarProxy> start(std::atomic<int>* notified = nullptr) {
    return FarProxy::start([this] { return network_.open(limits()); }, 0,
                           [notified] {
                             if (notified != nullptr) ++*notified;
                           })
        .value();
  }
  std::unique_ptr<FarProxy> start_watched(Watched::Calls& calls, std::atomic<int>& notified) {
    const auto open = [this, &calls]() -> Result<std::unique_ptr<transport::Transport>> {
      return std::unique_ptr<transport::Transport>(
          std::make_unique<Watched>(network_.open(limits()).value(), calls));
    };
    return FarProxy::start(open, 0, [&notified] { ++notified; }).value();
  }
  // Until something of `from` has come to `to`.
  static void greet(FarProxy& from, FarProxy& to, far::EngineId receiver) {
    FarProxy::Event event;
    ASSERT_TRUE(comes([&] {
      auto message = message_to(receiver, 0);
      from.send(message);
      ::usleep(1000);
      bool any = false;
      while (to.next(event)) {
        any |= event.kind == FarProxy::Event::Kind::kReceived;
        to.release(event.body);
      }
      return any;
    }));
  }

  // The first message that comes.
  static bool next_received(FarProxy& proxy, FarProxy::Event& event) {
    while (proxy.next(event)) {
      if (event.kind != FarProxy::Event::Kind::kConnected) return true;
    }
    return false;
  }

  transport::Network network_;
};

TEST_F(Proxies, ATransportThatDoesNotOpenIsAnError) {
  const auto proxy = FarProxy::start(
      []() -> Result<std::unique_ptr<transport::Transport>> {
        return Status(StatusCode::kNotFound, "no such library");
      },
      0, [] {});
  ASSERT_FALSE(proxy.ok());
  EXPECT_EQ(proxy.status().code(), StatusCode::kNotFound);
}

TEST_F(Proxies, APeerThatEndsIsToldOnceAndItsMessagesComeBack) {
  std::atomic<int> notified{0};
  const auto a = start(&notified);
  auto b = start();
  a->connect(kB, b->address());
  b->connect(kA, a->address());
  b.reset();
  const auto pool = std::make_shared<far::BufferPool>(64, 3);
  int downs = 0;
  EXPECT_TRUE(comes([&] {
    if (pool->available() != 0 && downs == 0) {
      auto message = std::make_unique<far::Message>();
      message->engine = kB;
      message->body = pool->take();
      a->send(message);
    }
    FarProxy::Event event;
    while (a->next(event)) downs += event.kind == FarProxy::Event::Kind::kDown ? 1 : 0;
    return downs != 0 && pool->available() == 3;
  }));
  EXPECT_EQ(downs, 1);
  EXPECT_GT(notified.load(), 0);
}

// An idle proxy wakes some ten times a second.
TEST_F(Proxies, AnIdleOneSleeps) {
  const auto proxy = FarProxy::start([this] { return network_.open(limits()); }, 20'000, [] {}).value();
  ::usleep(100'000);
  const std::uint64_t before = proxy->sleeps();
  const auto begin = std::chrono::steady_clock::now();
  ::usleep(500'000);
  const std::uint64_t sleeps = proxy->sleeps() - before;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LE(static_cast<double>(sleeps), 20 * took.count());
}

TEST_F(Proxies, ThatAPeerIsHeardComesFirstAndOnceWithItsFacts) {
  auto a = start(), b = start();
  EXPECT_EQ(a->carrier(), "in-process");
  a->connect(kB, b->address());
  b->connect(kA, a->address());
  std::vector<FarProxy::Event::Kind> kinds;
  FarProxy::Event event;
  ASSERT_TRUE(comes([&] {
    auto message = message_to(kA, 0);
    b->send(message);
    ::usleep(1000);
    while (a->next(event)) {
      if (kinds.empty()) {
        EXPECT_TRUE(event.facts != nullptr && event.facts->peer == "in-process");
      }
      EXPECT_EQ(event.engine, kB);
      kinds.push_back(event.kind);
      a->release(event.body);
    }
    return kinds.size() > 2;
  }));
  EXPECT_EQ(kinds[0], FarProxy::Event::Kind::kConnected);
  EXPECT_EQ(std::count(kinds.begin(), kinds.end(), FarProxy::Event::Kind::kConnected), 1);
}

TEST_F(Proxies, WhatAnEarlierConnectionBroughtIsNobodys) {
  std::atomic<int> notified{0};
  auto a = start(&notified), b = start();
  a->connect(kB, b->address());
  b->connect(kA, a->address());
  greet(*b, *a, kA);
  FarProxy::Event event;
  auto last = message_to(kA, 6);
  ASSERT_TRUE(b->send(last));
  ASSERT_TRUE(comes([&] {  // all that was on its way before
    bool came = false;
    while (a->next(event)) {
      came |= event.kind == FarProxy::Event::Kind::kReceived && number_of(event) == 6;
      a->release(event.body);
    }
    return came;
  }));
  const int before = notified;
  auto old = message_to(kA, 7);
  ASSERT_TRUE(b->send(old));
  ASSERT_TRUE(comes([&] { return notified != before; }));  // it lies in the ring
  a->close(kB);
  a->connect(kB, b->address());
  EXPECT_FALSE(a->next(event));
  ASSERT_TRUE(comes([&] {
    auto message = message_to(kA, 8);
    b->send(message);
    ::usleep(1000);
    return next_received(*a, event);
  }));
  EXPECT_EQ(event.kind, FarProxy::Event::Kind::kReceived);
  EXPECT_EQ(number_of(event), 8u);
}

TEST_F(Proxies, AnEarlierConnectionsEndIsNotTheNewOnes) {
  std::atomic<int> notified{0};
  auto a = start(&notified), b = start(), c = start();
  a->connect(kB, b->address());
  c->connect(kA, a->address());
  b->connect(kA, a->address());
  greet(*b, *a, kA);
  const int before = notified;
  b.reset();
  ASSERT_TRUE(comes([&] { return notified != before; }));
  a->connect(kB, c->address());  // without a close: it is in place of the old one
  FarProxy::Event event;
  ASSERT_TRUE(comes([&] {
    auto message = message_to(kA, 9);
    c->send(message);
    ::usleep(1000);
    return next_received(*a, event);
  }));
  EXPECT_EQ(event.kind, FarProxy::Event::Kind::kReceived);
  EXPECT_EQ(number_of(event), 9u);
  greet(*a, *c, kB);
}

TEST_F(Proxies, ConnectingAgainToTheSameAddressIsANewConnection) {
  auto a = start(), b = start();
  a->connect(kB, b->address());
  a->connect(kB, b->address());
  b->connect(kA, a->address());
  greet(*a, *b, kB);
  greet(*b, *a, kA);
  FarProxy::Event event;
  while (a->next(event)) EXPECT_NE(event.kind, FarProxy::Event::Kind::kDown) << event.status.message();
}

TEST_F(Proxies, AMessageThatIsTooLargeTakesItsPeerDown) {
  auto a = start(), b = start();
  a->connect(kB, b->address());
  auto message = message_to(kB, 1, 4097);
  ASSERT_TRUE(a->send(message));
  FarProxy::Event event;
  ASSERT_TRUE(comes([&] { return a->next(event); }));
  EXPECT_EQ(event.kind, FarProxy::Event::Kind::kDown);
  EXPECT_EQ(event.engine, kB);
  EXPECT_NE(event.status.message().find("body has 4097 bytes; allowed: 4096"), std::string::npos)
      << event.status.message();
  ::usleep(10'000);
  EXPECT_FALSE(a->next(event));
}

// More orders, and more answers, than a ring has space for: nothing is lost, the loop is told when it can go
// on, and the thread does not spin.
TEST_F(Proxies, FullRingsLoseNothing) {
  Watched::Calls calls;
  std::atomic<int> notified{0};
  auto a = start_watched(calls, notified);
  auto b = start();
  a->connect(kB, b->address());
  b->connect(kA, a->address());
  greet(*b, *a, kA);
  calls.held = true;
  ASSERT_TRUE(comes([&] {
    auto wake = message_to(kB, 0);
    a->send(wake);
    return calls.waiting.load();
  }));
  constexpr std::uint64_t kOrders = 20'000;
  for (std::uint64_t i = 0; i < kOrders; ++i) a->connect(100 + i, {});  // no address: it is down
  EXPECT_FALSE(a->has_news());                                          // no space yet
  const int before = notified;
  calls.held = false;
  ASSERT_TRUE(comes([&] { return notified != before && a->has_news(); }));
  // The loop takes nothing, and the other side continues to send.
  FarProxy::Event event;
  ASSERT_TRUE(comes([&] {
    const std::uint64_t arms = calls.arms;
    auto message = message_to(kA, 1);
    b->send(message);
    ::usleep(50'000);
    return calls.arms == arms;
  }));
  std::uint64_t downs = 0;
  ASSERT_TRUE(comes([&] {
    while (a->has_news() && a->next(event)) downs += event.kind == FarProxy::Event::Kind::kDown ? 1 : 0;
    return downs == kOrders;
  })) << downs;
}

}  // namespace
}  // namespace epd::test
