// Doorbells whose client end is watched a hundred thousand times over: each call that wakes who waits there
// walks all of them, and so does the last close. The engine's loop must make no such call.
#include "hostile.h"

#include "fault.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace epd::test {
namespace {

constexpr int kRounds = 20;

// Every copy of a descriptor, in every epoll instance, is a watch of its own.
class Watches {
 public:
  explicit Watches(std::initializer_list<int> watched) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const auto copies = std::min<std::uint64_t>(1000, limit.rlim_cur / 8);
    const auto instances = std::min<std::uint64_t>(250, limit.rlim_cur / 4);
    for (const int fd : watched) {
      for (std::uint64_t i = 0; i < copies; ++i) copies_.emplace_back(::dup(fd));
    }
    for (std::uint64_t i = 0; i < instances && !full_; ++i) {
      instances_.emplace_back(::epoll_create1(EPOLL_CLOEXEC));
      for (const UniqueFd& copy : copies_) watch(copy.get());
    }
  }
  std::uint64_t count() const { return count_; }
  // They stay as long as anybody else has what they watch.
  void close_copies() { copies_.clear(); }

 private:
  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT;
    if (::epoll_ctl(instances_.back().get(), EPOLL_CTL_ADD, fd, &event) == 0) {
      ++count_;
    } else {
      full_ = true;  // fs.epoll.max_user_watches
    }
  }

  std::vector<UniqueFd> copies_;
  std::vector<UniqueFd> instances_;
  std::uint64_t count_ = 0;
  bool full_ = false;
};

// Of a process's main thread.
std::uint64_t cpu_ns_of(pid_t pid) {
  const std::string id = std::to_string(pid);
  std::ifstream file("/proc/" + id + "/task/" + id + "/schedstat");
  std::uint64_t ns = 0;
  RANK_CHECK(static_cast<bool>(file >> ns), "schedstat of " + id);
  return ns;
}

std::uint64_t own_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

// A session that holds the watches.
struct Attacker {
  Attacker(const std::string& socket, const std::string& group)
      : session(socket, "host:0"),
        joined(session.join(group)),
        watches({session.bell(), session.client_bell()}) {
    RANK_CHECK(watches.count() > 10'000, std::to_string(watches.count()) + " watches");
    session.a().client_sleep.sleeping.store(1);
  }
  // A noop, rung for and answered by a ring while the engine sleeps. What one walk costs, by our own ring.
  std::uint64_t round() {
    RANK_CHECK(eventually(5, [&] { return session.b().engine_sleep.sleeping.load() != 0; }), "no sleep");
    const std::uint64_t before = own_cpu_ns();
    session.push(session.noop(joined));
    const std::uint64_t walk = own_cpu_ns() - before;
    RANK_CHECK(session.take(), "a noop was not answered");
    pollfd rung{session.client_bell(), POLLIN, 0};
    char byte;
    RANK_CHECK(::poll(&rung, 1, 10'000) == 1 && ::recv(rung.fd, &byte, 1, MSG_DONTWAIT) == 1, "not rung");
    return walk;
  }

  HostileSession session;
  abi::Joined joined;
  Watches watches;
};

class HostileBells : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 1;
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    engine_ = daemon_->engine(0);
  }
  void TearDown() override {
    EXPECT_EQ(daemon_->engine(0), engine_) << "the engine was restarted";
    daemon_->stop();
  }
  static void attack(const std::function<void()>& attacker) {
    expect_all_ok(run_ranks(1, 120, [&](std::uint32_t) -> std::string {
      attacker();
      return "";
    }));
  }
  void expect_census(const SystemCensus& before) const { expect_same_census(*daemon_, before); }

  std::unique_ptr<Daemon> daemon_;
  pid_t engine_ = -1;
};

TEST_F(HostileBells, TheEnginesLoopWalksNoWatches) {
  const SystemCensus before = settled_census(*daemon_);
  attack([&] {
    Attacker attacker(daemon_->socket(), "walks");
    std::vector<std::uint64_t> walks;
    const std::uint64_t begin = cpu_ns_of(engine_);
    for (int i = 0; i < kRounds; ++i) walks.push_back(attacker.round());
    const std::uint64_t used = cpu_ns_of(engine_) - begin;
    const std::uint64_t walk = *std::min_element(walks.begin(), walks.end());
    const std::string figures = std::to_string(attacker.watches.count()) + " watches, a walk takes " +
                                std::to_string(walk / 1000) + " us; the engine's loop took " +
                                std::to_string(used / kRounds / 1000) + " us for a round";
    std::printf("%s\n", figures.c_str());
    std::fflush(stdout);
    RANK_CHECK(used < kRounds * walk / 2, figures);
  });
  expect_census(before);
}

// Its client has closed what it watched, so whoever closes last in the daemon takes all watches away.
TEST_F(HostileBells, NobodysLoopClosesThemLast) {
  const SystemCensus before = settled_census(*daemon_);
  attack([&] {
    const std::size_t memfds = memfds_held(*daemon_);
    auto attacker = std::make_unique<Attacker>(daemon_->socket(), "closes");
    const std::uint64_t walk = attacker->round();
    attacker->watches.close_copies();
    const Watches kept = std::move(attacker->watches);
    const std::uint64_t engine_begin = cpu_ns_of(engine_);
    const std::uint64_t supervisor_begin = cpu_ns_of(daemon_->pid());
    attacker.reset();
    RANK_CHECK(eventually(20, [&] { return memfds_held(*daemon_) == memfds; }), "the session is still there");
    sleep_ms(200);
    const std::uint64_t by_engine = cpu_ns_of(engine_) - engine_begin;
    const std::uint64_t by_supervisor = cpu_ns_of(daemon_->pid()) - supervisor_begin;
    const std::string figures = "the engine's loop took " + std::to_string(by_engine / 1000) +
                                " us, the supervisor's " + std::to_string(by_supervisor / 1000) +
                                " us, a walk takes " + std::to_string(walk / 1000) + " us";
    std::printf("%s\n", figures.c_str());
    std::fflush(stdout);
    RANK_CHECK(std::max(by_engine, by_supervisor) < walk / 2, figures);
  });
  expect_census(before);
}

}  // namespace
}  // namespace epd::test
