// Doorbells whose client end is watched a hundred thousand times over: each call that wakes who waits there
// walks all of them, and so does the last close. The engine's loop must make no such call.
#include "hostile.h"

#include "fault.h"
#include "watches.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace epd::test {
namespace {

constexpr int kRounds = 20;
constexpr int kTries = 3;
constexpr std::uint32_t kWatches = 250'000;  // of each bell

// The processor time of a process's main thread.
std::uint64_t cpu_ns_of(pid_t pid) {
  const std::string id = std::to_string(pid);
  std::ifstream file("/proc/" + id + "/task/" + id + "/schedstat");
  std::uint64_t ns = 0;
  RANK_CHECK(static_cast<bool>(file >> ns), "schedstat of " + id);
  return ns;
}

// The threads and processes started while one lives run on the processor that it was made on. A process
// that unmaps memory waits for every processor it has run on to forget the pages, and one that walks watches
// for somebody else lets it wait: that time is charged to the process that unmaps.
class OneProcessor {
 public:
  OneProcessor() {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
    RANK_CHECK(::sched_getaffinity(0, sizeof(before_), &before_) == 0, "sched_getaffinity");
    RANK_CHECK(::sched_setaffinity(0, sizeof(one), &one) == 0, "sched_setaffinity");
  }
  ~OneProcessor() { ::sched_setaffinity(0, sizeof(before_), &before_); }
  OneProcessor(const OneProcessor&) = delete;
  OneProcessor& operator=(const OneProcessor&) = delete;

 private:
  cpu_set_t before_{};
};

// A session that holds the watches.
struct Attacker {
  Attacker(const std::string& socket, const std::string& group)
      : session(socket, "host:0"),
        joined(session.join(group)),
        watches({session.bell(), session.client_bell()}, kWatches),
        walk(cost_of_waking_ns(session.bell())) {
    session.a().client_sleep.sleeping.store(1);
  }
  // A noop, rung for and answered by a ring while the engine sleeps.
  void round() {
    RANK_CHECK(eventually(5, [&] { return session.b().engine_sleep.sleeping.load() != 0; }), "no sleep");
    session.push(joined, session.noop(joined));
    RANK_CHECK(session.take(joined), "a noop was not answered");
    pollfd rung{session.client_bell(), POLLIN, 0};
    char byte;
    RANK_CHECK(::poll(&rung, 1, 10'000) == 1 && ::recv(rung.fd, &byte, 1, MSG_DONTWAIT) == 1, "not rung");
  }

  HostileSession session;
  abi::Joined joined;
  Watches watches;
  std::uint64_t walk;  // ns
};

class HostileBells : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 1;
    daemon_ = std::make_unique<Daemon>(std::move(options));
    const std::string lacks = cannot_watch(2 * kWatches);
    if (!lacks.empty()) GTEST_SKIP() << lacks;
    {
      const OneProcessor daemons;
      ASSERT_TRUE(daemon_->start());
    }
    engine_ = daemon_->engine(0);
  }
  void TearDown() override {
    if (engine_ < 0) return;
    EXPECT_EQ(daemon_->engine(0), engine_) << "the engine was restarted";
    daemon_->stop();
  }
  static void attack(const std::function<void()>& attacker) {
    expect_all_ok(run_ranks(1, 120, [&](std::uint32_t) -> std::string {
      attacker();
      return "";
    }));
  }
  // All in ns.
  struct Cost {
    std::uint64_t engine, supervisor, walk;
  };
  // The cost of a session's end when its watches stay.
  Cost cost_of_an_end() const {
    const std::size_t memfds = memfds_held(*daemon_);
    auto attacker = std::make_unique<Attacker>(daemon_->socket(), "closes");
    const std::uint64_t walk = attacker->walk;
    attacker->round();
    const Watches kept = std::move(attacker->watches);
    const std::uint64_t engine_begin = cpu_ns_of(engine_);
    const std::uint64_t supervisor_begin = cpu_ns_of(daemon_->pid());
    attacker.reset();
    RANK_CHECK(eventually(20, [&] { return memfds_held(*daemon_) == memfds; }), "the session is still there");
    sleep_ms(200);
    return {cpu_ns_of(engine_) - engine_begin, cpu_ns_of(daemon_->pid()) - supervisor_begin, walk};
  }
  void expect_census(const SystemCensus& before) const { expect_same_census(*daemon_, before); }

  std::unique_ptr<Daemon> daemon_;
  pid_t engine_ = -1;
};

TEST_F(HostileBells, TheEnginesLoopWalksNoWatches) {
  const SystemCensus before = settled_census(*daemon_);
  attack([&] {
    Attacker attacker(daemon_->socket(), "walks");
    const std::uint64_t walk = attacker.walk;
    const std::uint64_t begin = cpu_ns_of(engine_);
    for (int i = 0; i < kRounds; ++i) attacker.round();
    const std::uint64_t used = cpu_ns_of(engine_) - begin;
    const std::string figures = "a walk takes " + std::to_string(walk / 1000) +
                                " us; the engine's loop took " + std::to_string(used / kRounds / 1000) +
                                " us for a round";
    std::printf("%s\n", figures.c_str());
    std::fflush(stdout);
    RANK_CHECK(used < kRounds * walk / 2, figures);
  });
  expect_census(before);
}

// The client keeps its ends, so the last close of each of the daemon's wakes all who wait there. Other work
// on this machine (interrupts, a hypervisor) is charged to the running thread, so the best of some tries
// counts.
TEST_F(HostileBells, NobodysLoopClosesThemLast) {
  const SystemCensus before = settled_census(*daemon_);
  attack([&] {
    std::string figures;
    for (int i = 0; i < kTries; ++i) {
      const Cost cost = cost_of_an_end();
      figures += "the engine's loop took " + std::to_string(cost.engine / 1000) + " us, the supervisor's " +
                 std::to_string(cost.supervisor / 1000) + " us, a walk takes " +
                 std::to_string(cost.walk / 1000) + " us\n";
      if (std::max(cost.engine, cost.supervisor) < cost.walk / 2) break;
      RANK_CHECK(i + 1 < kTries, figures);
    }
    std::printf("%s", figures.c_str());
    std::fflush(stdout);
  });
  expect_census(before);
}

}  // namespace
}  // namespace epd::test
