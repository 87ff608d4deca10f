// Nothing piles up: clients that come and go, politely or not, and strangers that send garbage leave the
// daemon's descriptors, mappings and threads as they were.
#include "common/signal.h"
#include "fault.h"
#include "support/raw_client.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <cstring>
#include <memory>
#include <random>

namespace epd::test {
namespace {

class Leaks : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = {{"timeouts.attach_ms", "1000"}, {"log.level", "\"info\""}};
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }

  // Two ranks attach, join, work, leave and detach `cycles` times.
  void come_and_go(int cycles, const std::string& prefix) {
    const Case c = fault_case(2, 2);
    expect_all_ok(run_ranks(2, 120, [&](std::uint32_t rank) -> std::string {
      for (int i = 0; i < cycles; ++i) {
        ScriptOptions options;
        options.rounds = 2;
        run_case(daemon_->socket(), daemon_->device(rank + static_cast<std::uint32_t>(i)),
                 prefix + std::to_string(i), c, rank, options);
      }
      return "";
    }));
  }

  void expect_small_growth(const SystemCensus& before, std::uint64_t kib) {
    if (!kMemoryIsOurs) return;
    const SystemCensus now = take_system_census(*daemon_);
    for (std::size_t i = 0; i < now.processes.size(); ++i)
      EXPECT_LT(now.processes[i].own_kib, before.processes[i].own_kib + kib) << "before:\n"
                                                                             << before.to_string() << "now:\n"
                                                                             << now.to_string();
  }

  std::unique_ptr<Daemon> daemon_;
};

TEST_F(Leaks, ClientsThatComeAndGo) {
  come_and_go(10, "warm-");  // thread caches and the like settle
  const SystemCensus before = settled_census(*daemon_);
  come_and_go(60, "cycle-");
  expect_same_census(*daemon_, before);
  expect_small_growth(before, 4096);
}

TEST_F(Leaks, ClientsThatAreKilled) {
  const Case c = fault_case(2, 2);
  const auto kill_some = [&](int cycles) {
    std::mt19937 random(12);
    for (int i = 0; i < cycles; ++i) {
      const std::string name = "killed-" + std::to_string(i);
      std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) {
        ScriptOptions options;
        options.rounds = 100000;
        return run_case(daemon_->socket(), daemon_->device(rank), name, c, rank, options);
      });
      sleep_ms(static_cast<int>(random() % 40));  // before, while or after they attach and join
      for (const RankProcess& rank : ranks) rank.kill(SIGKILL);
      for (RankProcess& rank : ranks) rank.wait(10);
    }
  };
  kill_some(5);
  const SystemCensus before = settled_census(*daemon_);
  kill_some(40);
  expect_same_census(*daemon_, before);
  expect_serves(*daemon_, 2, "after");
}

TEST_F(Leaks, GarbageOnTheAttachSocket) {
  const Case c = fault_case(2, 2);
  Shared<Gate> stop;
  const SystemCensus before = settled_census(*daemon_);
  std::vector<RankProcess> bystanders = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    ScriptOptions options;
    options.rounds = 400;
    return run_case(daemon_->socket(), daemon_->device(rank), "bystander", c, rank, options);
  });
  std::mt19937_64 random(99);
  for (int i = 0; i < 400; ++i) {
    const RawClient raw(daemon_->socket());
    ASSERT_TRUE(raw.valid()) << "connection " << i;
    if (i % 3 == 0) {
      const abi::Hello hello = RawClient::good_hello();
      raw.send(abi::AttachType::kHello, &hello, sizeof(hello));
    }
    std::vector<char> bytes(random() % 3000);
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 2 == 0 && bytes.size() >= sizeof(abi::WireHeader)) {
      // A good header, and a body of nonsense.
      const abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(random() % 12), 0,
                                   static_cast<std::uint32_t>(bytes.size()), 1};
      std::memcpy(bytes.data(), &header, sizeof(header));
    }
    raw.send_bytes(bytes.data(), bytes.size());
    if (i % 5 == 0) raw.receive(0.01);
  }
  expect_all_ok(wait_all(bystanders, 90));
  expect_same_census(*daemon_, before);
}

TEST_F(Leaks, HalfOpenConnections) {
  const SystemCensus before = settled_census(*daemon_);
  {
    std::vector<RawClient> silent;
    silent.reserve(30);
    for (int i = 0; i < 30; ++i) silent.emplace_back(daemon_->socket());
    expect_serves(*daemon_, 2, "beside");  // nobody has to wait for them
    for (const RawClient& raw : silent) EXPECT_TRUE(raw.closed_within(10));
  }
  // Killed between connect and Hello, and between Hello and Welcome.
  for (int i = 0; i < 20; ++i) {
    RankProcess doomed([&]() -> std::string {
      const RawClient raw(daemon_->socket());
      const abi::Hello hello = RawClient::good_hello();
      if (i % 2 == 0) raw.send(abi::AttachType::kHello, &hello, sizeof(hello));
      send_signal(::getpid(), SIGKILL);
      return "";
    });
    doomed.wait(10);
  }
  expect_same_census(*daemon_, before);
  expect_serves(*daemon_, 2, "after");
}

}  // namespace
}  // namespace epd::test
