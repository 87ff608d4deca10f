// Losses under groups that span nodes: the others continue or hear why not, bit for bit, and groups that are
// beside it notice nothing.
#include "common/signal.h"
#include "kit/nodes.h"
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/script.h"

#include <signal.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace epd::test {
namespace {

constexpr std::uint32_t kRanks = 4;

// node-a coordinates and has no rank of the group, but for where a test says so.
const std::vector<std::string> kPlaces{"b", "b", "c", "c"};

struct Stage {
  std::atomic<std::uint64_t> completed[kRanks];
  std::atomic<double> failed_at[kRanks];  // of the first operation that failed
  std::atomic<double> good_at[kRanks];    // of the first one that completed after that
  Gate finished;
  Gate seen;
  Gate joined;
};

class NodesFaults : public ClusterOfDaemons {
 protected:
  void SetUp() override {
    ASSERT_TRUE(prepare());
    const Settings quick{{"cluster.node_timeout_ms", "2000"},
                         {"cluster.heartbeat_ms", "50"},
                         {"cluster.orphan_ms", orphan_ms_},
                         {"engine.max_restarts_per_minute", "10000"}};
    for (const char* letter : {"a", "b", "c"}) start(letter, quick);
    for (const char* letter : {"b", "c"}) await("a", letter, "up");
  }
  void TearDown() override { bystander_asks_->ask(); }

  static Case spanning_case(bool degrade) {
    Case c = DaemonCluster::spanning_case(kRanks);
    c.degrade = degrade;
    c.sum_ranks = 2;
    return c;
  }
  Session attach(const std::string& letter, std::uint32_t rank) {
    return Session(at(letter).socket(), at(letter).device(rank));
  }
  // All ranks, until the group is lost. Each returns what libepd says of that.
  void start_until_lost(const Case& c, std::uint32_t rounds) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks_.emplace_back([this, c, rounds, rank]() -> std::string {
        const Session session = attach(kPlaces[rank], rank);
        const Group group(session, c.config("spans", rank));
        ScriptOptions o = options(rank, rounds, kRanks);
        o.end = EPD_RANK_LOST;
        o.finished = nullptr;
        (void)ScriptRunner(group, c, rank, o).run();
        return epd_last_error();
      });
    }
  }
  // Options of each rank: rounds that it repeats after failures, until `rounds` are done or `end` comes.
  ScriptOptions options(std::uint32_t rank, std::uint32_t rounds, std::uint32_t finishers) {
    ScriptOptions o;
    o.rounds = rounds;
    o.order = Order::kWindows;
    o.recover = true;
    o.finished = &stage_->finished;
    o.num_finishers = finishers;
    o.timeout_ms = timeout_ms_;
    o.on_complete = [this, rank](std::uint64_t) {
      stage_->completed[rank].fetch_add(1);
      if (stage_->failed_at[rank] > 0 && stage_->good_at[rank] == 0) stage_->good_at[rank] = now_seconds();
    };
    o.on_failure = [this, rank](epd_status_t) {
      if (stage_->failed_at[rank] == 0) stage_->failed_at[rank] = now_seconds();
    };
    return o;
  }
  void start_ranks(const Case& c, std::uint32_t rounds, std::uint32_t finishers,
                   const std::set<std::string>& allowed) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks_.emplace_back([this, &c, rank, rounds, finishers, allowed]() -> std::string {
        const Session session = attach(kPlaces[rank], rank);
        const Group group(session, c.config("spans", rank));
        const ScriptStats stats = ScriptRunner(group, c, rank, options(rank, rounds, finishers)).run();
        for (const auto& [status, count] : stats.failures)
          RANK_CHECK(allowed.contains(status), stats.to_string());
        stage_->seen.meet(finishers);
        return stats.to_string();
      });
    }
  }
  bool run_for(std::uint64_t operations) {
    return eventually(60, [&] {
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
        if (stage_->completed[rank] < operations) return false;
      }
      return true;
    });
  }
  void expect_ends_well(const std::set<std::uint32_t>& survivors) {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const RankOutcome outcome = ranks_[rank].wait(survivors.contains(rank) ? 90 : 10);
      if (survivors.contains(rank)) {
        EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
      }
      std::printf("rank %u: %s\n", rank, outcome.to_string().c_str());
    }
  }
  void say_when(const char* what, double from, const std::set<std::uint32_t>& survivors) {
    for (const std::uint32_t rank : survivors) {
      std::printf("%s: rank %u failed after %.3f s, went on after %.3f s\n", what, rank,
                  stage_->failed_at[rank] - from, stage_->good_at[rank] - from);
    }
  }

  // A group on nodes a and b that runs beside all this.
  void start_bystander() {
    Case c = spanning_case(false);
    c.num_ranks = 2;
    c.num_experts = 8;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      bystanders_.emplace_back([this, c, rank]() -> std::string {
        const Session session = attach(rank == 0 ? "a" : "b", 1);
        const Group group(session, c.config("bystander", rank));
        std::uint64_t round = 0;
        for (; bystander_asks_->comes(rank, round); ++round) {
          ScriptOptions o;
          o.rounds = 1;
          o.first_op = 2 * round;
          ScriptRunner(group, c, rank, o).run();
          bystander_rounds_->fetch_add(1);
        }
        return std::to_string(round) + " rounds";
      });
    }
    ASSERT_TRUE(eventually(30, [&] { return *bystander_rounds_ > 20; }));
  }
  void expect_bystander_unharmed() {
    bystander_asks_->ask();
    const std::vector<RankOutcome> outcomes = wait_all(bystanders_, 30);
    expect_all_ok(outcomes);
    std::printf("bystander: %s\n", outcomes[0].text.c_str());
  }

  std::string orphan_ms_ = "3000";
  std::uint32_t timeout_ms_ = 20'000;  // of operations
  Shared<Stage> stage_;
  Shared<LastRound> bystander_asks_;
  Shared<std::atomic<std::uint64_t>> bystander_rounds_;
  std::vector<RankProcess> ranks_;
  std::vector<RankProcess> bystanders_;
};

TEST_F(NodesFaults, AKilledDaemonUnderDegrade) {
  const Case c = spanning_case(true);
  start_bystander();
  start_ranks(c, 200, 2, {"RANK_LOST", "ENGINE_RESTARTED", "ABORTED", "DAEMON_LOST"});
  ASSERT_TRUE(run_for(40));
  const double killed = now_seconds();
  at("c").signal(SIGKILL);
  expect_ends_well({0, 1});
  say_when("kill -9 of a daemon", killed, {0, 1});
  expect_bystander_unharmed();
}

// Groups of one node showed both.
TEST_F(NodesFaults, ASpanningGroupThatGoesOnNamedNoLostRanksAndNoBreak) {
  const Case c = spanning_case(true);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks_.emplace_back([this, &c, rank]() -> std::string {
      const Session session = attach(kPlaces[rank], rank);
      const Group group(session, c.config("spans", rank));
      stage_->joined.arrive();
      stage_->seen.wait_for(1);
      return "";
    });
  }
  ASSERT_TRUE(eventually(30, [&] { return stage_->joined.count == kRanks; }));
  at("c").signal(SIGKILL);
  nlohmann::json group;
  ASSERT_TRUE(eventually(20, [&] {
    group = nlohmann::json::parse(at("b").epctl({"--json", "groups"}).out)["groups"][0];
    return group["state"] == "active" && group["missing_ranks"] == nlohmann::json({2, 3});
  })) << group;
  EXPECT_NE(group["cause"].get<std::string>().find("RANK_LOST"), std::string::npos) << group;
  const std::string text = at("b").epctl({"groups"}).out;
  EXPECT_NE(text.find("goes on without 2 ranks: 2, 3"), std::string::npos) << text;
  stage_->seen.open();
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(ranks_[rank].wait(20).ok);
}

TEST_F(NodesFaults, AKilledDaemonUnderFailFastSaysRankNodeAndAddress) {
  const Case c = spanning_case(false);
  start_bystander();
  start_until_lost(c, 100'000);
  ASSERT_TRUE(run_for(40));
  at("c").signal(SIGKILL);
  for (const std::uint32_t rank : {0u, 1u}) {
    const RankOutcome outcome = ranks_[rank].wait(30);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    for (const std::string& part : {std::string("lost"), std::string("node-c"), address("c")})
      EXPECT_NE(outcome.text.find(part), std::string::npos) << part << " is not in: " << outcome.text;
  }
  expect_bystander_unharmed();
}

TEST_F(NodesFaults, KilledEnginesAreRestartedAndAllGoesOn) {
  for (const bool degrade : {false, true}) {
    const Case c = spanning_case(degrade);
    ranks_.clear();
    new (&*stage_) Stage{};
    start_ranks(c, 300, kRanks, {"ENGINE_RESTARTED"});
    for (const char* letter : {"c", "b", "c"}) {
      ASSERT_TRUE(run_for(stage_->completed[0] + 30));
      send_signal(at(letter).engine(0), SIGKILL);
    }
    expect_ends_well({0, 1, 2, 3});
    if (HasFailure()) return;
  }
}

TEST_F(NodesFaults, ALostRankComesBackOnAnotherNode) {
  const Case c = spanning_case(true);
  start_bystander();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks_.emplace_back([this, &c, rank]() -> std::string {
      const Session session = attach(kPlaces[rank], rank);
      const Group group(session, c.config("spans", rank));
      ScriptOptions o = options(rank, 150, kRanks);
      o.on_complete = [this, rank](std::uint64_t completed) {
        stage_->completed[rank].store(completed);
        if (completed == 40 && rank == 3) sleep_ms(60'000);  // until it is killed
        if (completed == 150) stage_->joined.wait_for(1);
      };
      const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
      RANK_CHECK(epd_group_active(group.get(), 3) == 1, "the rank is back");
      stage_->seen.meet(kRanks);
      return stats.to_string();
    });
  }
  ASSERT_TRUE(run_for(40));
  ranks_[3].kill(SIGKILL);
  ranks_[3].wait(10);
  ASSERT_TRUE(eventually(60, [&] { return stage_->completed[0] >= 100; }));
  RankProcess newcomer([this, &c]() -> std::string {
    const Session session = attach("a", 0);
    const Group group(session, c.config("spans", 3));
    stage_->joined.open();
    const ScriptStats stats = ScriptRunner(group, c, 3, options(3, 150, kRanks)).run();
    stage_->seen.meet(kRanks);
    return stats.to_string();
  });
  expect_ends_well({0, 1, 2});
  const RankOutcome outcome = newcomer.wait(60);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  expect_bystander_unharmed();
}

// Its processes are stopped for longer than others wait; then they continue, and join again.
TEST_F(NodesFaults, AStoppedNodeIsPutOutAndItsRanksRejoin) {
  const Case c = spanning_case(true);
  start_bystander();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks_.emplace_back([this, &c, rank]() -> std::string {
      const Session session = attach(kPlaces[rank], rank);
      ScriptOptions o = options(rank, 400, kRanks);
      o.on_complete = [this, rank](std::uint64_t completed) {
        stage_->completed[rank].store(completed);
        if (rank < 2 && completed == 400) stage_->joined.wait_for(2, 90);
      };
      std::string text;
      for (int life = 0; life < 2; ++life) {
        const Group group(session, c.config("spans", rank));
        if (life == 1) stage_->joined.arrive();
        if (rank >= 2) {
          o.end = life == 0 ? EPD_RANK_LOST : EPD_OK;
          o.finished = life == 0 ? nullptr : &stage_->finished;
        }
        const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
        text += stats.to_string() + "; ";
        const bool over = rank < 2 || life == 1;
        if (over) {
          stage_->seen.meet(kRanks);
          break;
        }
        RANK_CHECK(std::string(epd_last_error()).find("rank") != std::string::npos, epd_last_error());
      }
      return text;
    });
  }
  ASSERT_TRUE(run_for(40));
  std::vector<pid_t> stopped = at("c").all_pids();
  for (const std::uint32_t rank : {2u, 3u}) stopped.push_back(ranks_[rank].pid());
  const double begin = now_seconds();
  for (const pid_t pid : stopped) send_signal(pid, SIGSTOP);
  sleep_ms(10'000);
  for (const pid_t pid : stopped) send_signal(pid, SIGCONT);
  std::printf("stopped for %.1f s\n", now_seconds() - begin);
  expect_ends_well({0, 1, 2, 3});
  expect_bystander_unharmed();
}

// Each node has a network of its own, and times are those of the default configuration.
class NodesFaultsOfLinks : public NodesFaults {
 protected:
  void SetUp() override {
    if (const std::string why_not = kit::NodeNetwork::why_not(); !why_not.empty())
      GTEST_SKIP() << "nodes can't be made here: " << why_not;
    network_.emplace(3);
    for (std::uint32_t node = 0; node < 3; ++node) {
      place(kLetters[node], network_->address(node), [this, node] {
        if (*network_->enter(node) != '\0') ::_exit(126);
      });
    }
    ASSERT_TRUE(prepare());
    for (const char* letter : kLetters) start(letter);
    for (const char* letter : kLetters) await("a", letter, "up");
  }

  static constexpr const char* kLetters[] = {"a", "b", "c"};
  std::optional<kit::NodeNetwork> network_;
};

TEST_F(NodesFaultsOfLinks, ANodeWithoutItsCableUnderDegrade) {
  timeout_ms_ = 300'000;  // no deadline ends what the node without its cable has in flight
  const Case c = spanning_case(true);
  start_bystander();
  start_ranks(c, 200, 2, {"RANK_LOST", "ENGINE_RESTARTED", "ABORTED"});
  ASSERT_TRUE(run_for(40));
  const double cut = now_seconds();
  network_->unplug(2);
  // Nobody decides for its own ranks there, so that it ends them itself, and it comes back.
  EXPECT_TRUE(eventually(30, [&] { return stage_->failed_at[2] > 0 && stage_->failed_at[3] > 0; }));
  say_when("link down", cut, {0, 1});
  for (const std::uint32_t rank : {2u, 3u})
    std::printf("its own: rank %u failed after %.3f s\n", rank, stage_->failed_at[rank] - cut);
  network_->plug(2);
  expect_ends_well({0, 1});
  await("a", "c", "up");
  expect_bystander_unharmed();
}

// An engine whose peer has a false address does the same. The engines of the peer's node are stopped
// meanwhile.
TEST_F(NodesFaults, AnEngineThatDiesWhileItConnectsSaysToWhom) {
  const Case c = spanning_case(false);
  std::vector<pid_t> stopped;
  for (const std::uint32_t device : {0u, 1u}) stopped.push_back(at("c").engine(device));
  for (const pid_t pid : stopped) send_signal(pid, SIGSTOP);
  start_ranks(c, 5, kRanks, {"ENGINE_RESTARTED"});
  EXPECT_TRUE(eventually(30, [&] {
    const std::string network = at("b").epctl({"network"}).out;
    return network.find("node-c") != std::string::npos && network.find("connecting") != std::string::npos;
  })) << at("b").epctl({"network"}).out;
  send_signal(at("b").engine(0), SIGABRT);
  const std::string expected = ", while it connected to host:";
  EXPECT_TRUE(eventually(10, [&] { return at("b").log().find(expected) != std::string::npos; }))
      << at("b").log();
  EXPECT_NE(at("b").log().find(" of node-c", at("b").log().find(expected)), std::string::npos);
  EXPECT_NE(at("b").epctl({"events"}).out.find(expected), std::string::npos);
  for (const pid_t pid : stopped) send_signal(pid, SIGCONT);
  expect_ends_well({0, 1, 2, 3});
}

// One was confirmed and recorded, and the rank continued for ever.
TEST_F(NodesFaults, AnEvictionIsRefusedOrCarriedOutByTheNextCoordinator) {
  const Case c = spanning_case(false);
  start_until_lost(c, 1'000'000);
  ASSERT_TRUE(run_for(40));
  at("a").signal(SIGSTOP);
  const CommandResult said = at("b").epctl({"evict", "group", "spans", "rank", "0", "--reason", "said"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  at("a").signal(SIGKILL);
  ASSERT_NE(at("a").wait_exit(10), -1);
  sleep_ms(2'500);  // longer than node_timeout_ms
  const CommandResult refused =
      at("b").epctl({"evict", "group", "spans", "rank", "1", "--reason", "too late"});
  EXPECT_EQ(refused.exit_code, 1) << refused.out;
  EXPECT_NE(refused.err.find("ABORTED: node node-b has no coordinator, which decides about rank 1"),
            std::string::npos)
      << refused.err;
  const std::string events = at("b").epctl({"events"}).out;
  EXPECT_NE(events.find("was evicted by operator: said"), std::string::npos) << events;
  EXPECT_EQ(events.find("too late"), std::string::npos) << events;
  start("a");
  for (RankProcess& rank : ranks_) {
    const RankOutcome outcome = rank.wait(60);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    EXPECT_NE(outcome.text.find("was evicted by operator: said"), std::string::npos) << outcome.text;
  }
}

// Nodes wait for their coordinator longer than clients for operations.
class NodesFaultsThatWait : public NodesFaults {
 protected:
  NodesFaultsThatWait() { orphan_ms_ = "120000"; }

  // One on b and one on c. Rank 0 submits an operation that rank 1 does not, and returns how its wait ends.
  void start_two() {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks_.emplace_back([this, rank]() -> std::string {
        Case c = spanning_case(false);
        c.num_ranks = 2;
        c.num_experts = 8;
        c.sum_ranks = 1;
        const Session session = attach(rank == 0 ? "b" : "c", 0);
        const Group group(session, c.config("spans", rank));
        stage_->joined.arrive();
        stage_->seen.wait_for(1);
        if (rank == 1) {
          stage_->finished.wait_for(1, 60);
          return "";
        }
        epd_ticket_t ticket = 0;
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.timeout_ms = 500;
        must(group.dispatch(&args, &ticket, nullptr), "dispatch");
        const epd_status_t status = epd_ticket_wait(group.get(), ticket, EPD_FOREVER, nullptr);
        std::string text = epd_last_error();
        RANK_CHECK(status == EPD_DEADLINE_EXCEEDED, text);
        stage_->finished.open();
        return text;
      });
    }
    ASSERT_TRUE(eventually(60, [&] { return stage_->joined.count == 2; }));
  }
  // The answer of epctl op on b for the only operation there.
  std::string op_on_b() {
    const Json list = Json::parse(at("b").epctl({"--json", "ops"}).out, nullptr, false);
    if (!list.is_object() || list["operations"].size() != 1) return "";
    return at("b").epctl({"op", list["operations"][0]["id"]}).out;
  }
};

// They said that the next epoch was about to begin, and that the engine was stopped.
TEST_F(NodesFaultsThatWait, AnOverdueOperationNamesTheCoordinatorThatIsAway) {
  start_two();
  at("a").signal(SIGKILL);
  ASSERT_NE(at("a").wait_exit(10), -1);
  stage_->seen.open();
  std::string op;
  EXPECT_TRUE(eventually(20, [&] {
    op = op_on_b();
    return op.find("waits for the coordinator, which has been away for") != std::string::npos;
  })) << op;
  const std::string groups = at("b").epctl({"groups"}).out;
  EXPECT_NE(groups.find("(spans): no coordinator for"), std::string::npos) << groups;
  const RankOutcome outcome = ranks_[0].wait(60);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  EXPECT_NE(outcome.text.find("or the cluster's coordinator, does not answer"), std::string::npos)
      << outcome.text;
  start("a");
  EXPECT_TRUE(ranks_[1].wait(60).ok);
}

// Its groups need nothing of it meanwhile.
TEST_F(NodesFaults, GroupsRunOnWithoutTheirCoordinator) {
  const Case c = spanning_case(false);
  start_ranks(c, 600, kRanks, {});
  ASSERT_TRUE(run_for(40));
  at("a").signal(SIGKILL);
  ASSERT_NE(at("a").wait_exit(10), -1);
  ASSERT_TRUE(run_for(stage_->completed[0] + 100));
  start("a");
  expect_ends_well({0, 1, 2, 3});
  // It takes the nodes in again, and serves.
  await("a", "b", "up");
  await("a", "c", "up");
  expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
    Case small = spanning_case(false);
    small.num_ranks = 2;
    small.num_experts = 8;
    const Session session = attach(rank == 0 ? "b" : "c", 0);
    const Group group(session, small.config("after", rank));
    return ScriptRunner(group, small, rank, {.rounds = 3}).run().to_string();
  }));
}

}  // namespace
}  // namespace epd::test
