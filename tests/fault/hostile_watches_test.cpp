// Clients whose sockets have hundreds of thousands of waiters. Every use of such a socket by the daemon (it
// receives, answers, hangs up) wakes all of them, in the time of the thread that does it: so that must be no
// thread that serves others. The processor time of the daemon's threads is compared with the cost of the
// wakes.
#include "hostile_fixture.h"
#include "watches.h"

#include <sys/socket.h>
#include <atomic>
#include <cstdio>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

using abi::AttachType;

constexpr std::uint32_t kWatches = 300'000;  // of each socket; some 30 ms a wake, 60 MB
constexpr std::size_t kSockets = 5;
constexpr std::uint64_t kMostWatches = kSockets * kWatches;
constexpr int kRequests = 12;
constexpr double kPatienceS = 20;
constexpr std::size_t kMaxWithoutHello = 32;  // of a user
constexpr std::uint64_t kHelloWakes = 3;      // a packet received, an answer, the shutdown
constexpr std::uint64_t kUnheardWakes = 2;    // an answer, the shutdown
constexpr std::uint64_t kRequestWakes = 2;    // a packet received, an answer

struct Attack {
  std::atomic<std::uint64_t> cost_ns;
  std::atomic<bool> over;
};

class HostileWatches : public Hostile {
 protected:
  void SetUp() override {
    if (const std::string lack = cannot_watch(kMostWatches); !lack.empty()) GTEST_SKIP() << lack;
    Hostile::SetUp();
  }

  // Lets the attacker cause wakes while others are served. It returns the cost of those wakes.
  // No thread that was there before may have made them: not the loop, nor any other that serves all. These
  // have other work too, the more of it the longer the attack takes.
  void weigh(const std::function<std::uint64_t()>& attacker) {
    Shared<Attack> attack_;
    const ThreadTimes before = thread_times(daemon().pid());
    const std::uint64_t all_before_ms = cpu_ms(daemon().pid());
    attack({[&] {
              const Ends ends{attack_->over};
              attack_->cost_ns = attacker();
            },
            [&] { be_served_until(attack_->over); }});
    const ThreadTimes after = thread_times(daemon().pid());
    const std::uint64_t cost_ns = attack_->cost_ns;
    ASSERT_GT(cost_ns, 0u);
    std::uint64_t loop_ns = 0;
    std::uint64_t most_ns = 0;
    for (const auto& [thread, time_ns] : after) {
      const auto was = before.find(thread);
      if (was == before.end()) continue;
      const std::uint64_t had_ns = time_ns - was->second;
      if (thread == daemon().pid()) loop_ns = had_ns;
      most_ns = std::max(most_ns, had_ns);
      // Threads that start and end beside walks wait for these now and then: base/README.md, "The gate".
      EXPECT_LT(had_ns, cost_ns * 3 / 4)
          << "thread " << thread << (thread == daemon().pid() ? " (the loop)" : " of the supervisor");
    }
    std::printf("wakes cost %.0f ms; the loop had %.0f ms, the busiest shared thread %.0f ms, all %.0f ms\n",
                ms(cost_ns), ms(loop_ns), ms(most_ns), double(cpu_ms(daemon().pid()) - all_before_ms));
  }

  // Enough of them, and the oldest connections of the user are ended.
  std::vector<std::unique_ptr<RawClient>> silent_connections(std::size_t count) const {
    std::vector<std::unique_ptr<RawClient>> silent;
    for (std::size_t i = 0; i < count; ++i) silent.push_back(std::make_unique<RawClient>(socket()));
    return silent;
  }

 private:
  struct Ends {
    std::atomic<bool>& over;
    ~Ends() { over = true; }
  };
  static double ms(std::uint64_t ns) { return double(ns) / 1e6; }

  void be_served_until(const std::atomic<bool>& over) const {
    const double end = now_s() + 2 * kPatienceS;
    for (int round = 0; !over && now_s() < end; ++round) {
      HostileSession session(socket(), "host:1");
      const abi::Joined joined = session.join("beside-" + std::to_string(round));
      session.push(joined, session.noop(joined));
      const std::optional<abi::CallEnd> end_of = session.take(joined, kPatienceS);
      RANK_CHECK(end_of && end_of->ending == abi::CallEnding::kCarriedOut, "a noop beside the attack");
      RANK_CHECK(daemon().epctl({"status"}, kPatienceS).exit_code == 0, "epctl status beside the attack");
      sleep_ms(200);
    }
  }
};

// Sockets that have their waiters before the daemon ever sees them.
class Watched {
 public:
  Watched() {
    std::vector<int> all;
    for (std::size_t i = 0; i < kSockets; ++i) {
      sockets_.push_back(RawClient::make_unconnected());
      all.push_back(sockets_.back().get());
    }
    watches_ = std::make_unique<Watches>(all, kWatches);
  }
  bool more() const { return !sockets_.empty(); }
  UniqueFd take() {
    UniqueFd socket = std::move(sockets_.back());
    sockets_.pop_back();
    return socket;
  }

 private:
  std::vector<UniqueFd> sockets_;
  std::unique_ptr<Watches> watches_;
};

void must_be_refused(const RawClient& client, const std::string& status) {
  must_hold(refusal(client.receive(kPatienceS)), {status});
  RANK_CHECK(client.closed_within(kPatienceS), "its connection is still open");
}

TEST_F(HostileWatches, OfConnectionsThatSayNonsense) {
  weigh([&] {
    Watched watched;
    std::uint64_t cost_ns = 0;
    while (watched.more()) {
      const RawClient client(watched.take(), socket());
      cost_ns += kHelloWakes * cost_of_waking_ns(client.fd());
      RANK_CHECK(client.send_bytes("this is no packet of any of its protocols", 40), "send");
      must_be_refused(client, "INVALID_ARGUMENT");
    }
    return cost_ns;
  });
}

TEST_F(HostileWatches, OfConnectionsThatAreTooMany) {
  if (!root()) GTEST_SKIP() << "needs root, to be another user";
  weigh([&] {
    become(kMallory);
    Watched watched;
    std::vector<RawClient> oldest;
    oldest.emplace_back(watched.take(), socket());
    const std::uint64_t wake_ns = cost_of_waking_ns(oldest.front().fd());
    while (watched.more()) oldest.emplace_back(watched.take(), socket());
    const auto silent = silent_connections(kMaxWithoutHello);
    std::uint64_t cost_ns = 0;
    for (const RawClient& client : oldest) {
      must_be_refused(client, "RESOURCE_EXHAUSTED");
      cost_ns += kUnheardWakes * wake_ns;
    }
    return cost_ns;
  });
}

TEST_F(HostileWatches, OfConnectionsThatSayNothing) {
  weigh([&] {
    Watched watched;
    std::vector<RawClient> clients;
    std::uint64_t cost_ns = 0;
    while (watched.more()) {
      clients.emplace_back(watched.take(), socket());
      cost_ns += kUnheardWakes * cost_of_waking_ns(clients.back().fd());
    }
    for (const RawClient& client : clients) must_be_refused(client, "DEADLINE_EXCEEDED");
    return cost_ns;
  });
}

std::uint64_t refused_requests(HostileSession& session, int count) {
  for (int i = 0; i < count; ++i) {
    abi::Join join = HostileSession::good_join("watched");
    join.shape.num_ranks = 0;
    must_hold(session.ask(AttachType::kJoin, join), {"INVALID_ARGUMENT"});
    RANK_CHECK(session.ask(AttachType::kLeave, abi::Leave{~0u, 0}).find(": ") != std::string::npos,
               "a Leave of nothing was answered with OK");
  }
  return 2 * static_cast<std::uint64_t>(count) * kRequestWakes;
}

TEST_F(HostileWatches, OfASessionThatIsRefusedWhateverItAsks) {
  weigh([&] {
    HostileSession session(socket(), "host:0");
    const Watches watches({session.socket()}, kWatches);
    const std::uint64_t wake_ns = cost_of_waking_ns(session.socket());
    const std::uint64_t wakes = refused_requests(session, kRequests) + kHelloWakes;
    RANK_CHECK(::send(session.socket(), "nonsense", 8, MSG_NOSIGNAL) == 8, "send");
    must_hold(session.ended(kPatienceS), {"INVALID_ARGUMENT"});
    return wakes * wake_ns;
  });
}

TEST_F(HostileWatches, OfSessionsThatTheDaemonEnds) {
  weigh([&] {
    std::vector<std::unique_ptr<HostileSession>> sessions;
    std::vector<int> sockets;
    for (std::size_t i = 0; i < kSockets; ++i) {
      sessions.push_back(std::make_unique<HostileSession>(socket(), "host:0"));
      sockets.push_back(sessions.back()->socket());
    }
    const Watches watches(sockets, kWatches);
    std::uint64_t cost_ns = 0;
    for (std::size_t i = 0; i < kSockets; ++i) {
      HostileSession& session = *sessions[i];
      const bool evicted = i % 2 == 0;
      cost_ns += kUnheardWakes * cost_of_waking_ns(session.socket());
      if (evicted) {
        RANK_CHECK(daemon().epctl({"evict", "session", std::to_string(session.id())}).exit_code == 0,
                   "evict");
      } else {
        const abi::Joined joined = session.join("illegal-" + std::to_string(i));
        abi::Call illegal = session.noop(joined);
        illegal.slot = 9;
        session.push(joined, illegal);
      }
      RANK_CHECK(!session.ended(kPatienceS).empty(), "its session lives on");
    }
    return cost_ns;
  });
}

// A thread that wakes also waits for the lock of the queue. Our own threads hold it nearly always.
TEST_F(HostileWatches, OfSocketsWhoseOwnersWakeThemselvesWithoutEnd) {
  weigh([&] {
    HostileSession session(socket(), "host:0");
    const Watches watches({session.socket()}, kWatches);
    const std::uint64_t wake_ns = cost_of_waking_ns(session.socket());
    const Hammer hammer(session.socket(), 2);
    return refused_requests(session, kRequests / 4) * wake_ns;
  });
}

}  // namespace
}  // namespace epd::test
