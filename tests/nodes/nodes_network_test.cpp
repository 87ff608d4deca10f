// An operator's view of the network between nodes: epctl network, groups, op, doctor.
#include "common/signal.h"
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/script.h"
#include "support/sockets.h"

#include <signal.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>

namespace epd::test {
namespace {

// Rank 0 on node-a submits and waits; rank 1 on node-b does so when the test says.
struct Stage {
  Gate ready;
  Gate go;
  Gate end;
};

class NodesNetwork : public ClusterOfDaemons {
 protected:
  void SetUp() override {
    ASSERT_TRUE(prepare());
    for (const char* letter : {"a", "b"}) start(letter);
    await("a", "b", "up");
  }
  Json epctl(const std::string& letter, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--json");
    const CommandResult result = at(letter).epctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    return Json::parse(result.out, nullptr, false);
  }
  void start_ranks() {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks_.emplace_back([this, rank]() -> std::string {
        Case c = spanning_case();
        c.sum_ranks = 2;  // so there are asks
        Daemon& daemon = at(rank == 0 ? "a" : "b");
        const Session session(daemon.socket(), daemon.device(0));
        const Group group(session, c.config("network", rank));
        const std::string stats = ScriptRunner(group, c, rank, {.rounds = 3}).run().to_string();
        stage_->ready.arrive();
        if (rank == 1) stage_->go.wait_for(1);
        epd_ticket_t ticket = 0;
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.timeout_ms = 60000;
        must(group.dispatch(&args, &ticket, nullptr), "dispatch");
        must(group.wait(ticket, 60000), "dispatch");
        stage_->end.meet(2);
        return stats;
      });
    }
    ASSERT_TRUE(eventually(60, [&] { return stage_->ready.count == 2; }));
  }
  // The answer of epctl op on node-a for the only operation in flight there.
  Json the_operation() {
    const Json operations = epctl("a", {"ops"})["operations"];
    if (operations.size() != 1) return nullptr;
    const CommandResult result = at("a").epctl({"--json", "op", operations[0]["id"]});
    return result.exit_code == 0 ? Json::parse(result.out, nullptr, false) : Json(nullptr);
  }
  // On both nodes, once the first ping was answered.
  void expect_network() {
    for (const auto& [own, other] : {std::pair("a", "node-b"), {"b", "node-a"}}) {
      Json network;
      EXPECT_TRUE(eventually(20, [&] {
        network = epctl(own, {"network"});
        return network["far_engines"].size() == 1 && !network["far_engines"][0]["round_trip_us"].is_null();
      })) << network;
      const Json& far = network["far_engines"][0];
      EXPECT_EQ(far["device"], "host:0");
      EXPECT_EQ(far["node"], other);
      EXPECT_EQ(far["far_device"], "host:0");
      EXPECT_EQ(far["state"], "connected");
      EXPECT_EQ(far["reason"], "");
      EXPECT_EQ(far["carrier"].get<std::string>().find("UCX 1."), 0u) << far;
      EXPECT_EQ(far["carrier"], far["far_carrier"]);
      EXPECT_NE(far["lanes"].get<std::string>().find("lane"), std::string::npos) << far;
      EXPECT_EQ(far["groups"], 1);
      EXPECT_GT(far["window_bytes"], 0);
      for (const char* kind : {"rows", "asks", "sums"}) {
        for (const char* count : {"batches_sent", "bytes_sent", "batches_received", "bytes_received"})
          EXPECT_GT(far[kind][count], 0) << kind << " " << count;
      }
      EXPECT_TRUE(far["dropped"].is_array());
      const Json& engine = network["engines"][0];
      EXPECT_EQ(engine["problem"], "");
      EXPECT_EQ(engine["carrier"], far["carrier"]);
      EXPECT_EQ(engine["promised_bytes"], far["window_bytes"]);
      EXPECT_GE(engine["max_bytes"], engine["promised_bytes"]);
      EXPECT_NE(at(own).epctl({"network"}).out.find(other), std::string::npos);
    }
  }

  Shared<Stage> stage_;
  std::vector<RankProcess> ranks_;
};

TEST_F(NodesNetwork, EnginesGroupsAndOperationsNameTheOtherNode) {
  start_ranks();
  expect_network();
  const std::string members = at("a").epctl({"groups", "--members"}).out;
  EXPECT_NE(members.find("node-b"), std::string::npos) << members;

  Json op;
  ASSERT_TRUE(eventually(20, [&] {
    op = the_operation();
    return !op.is_null() && !op["waits"].empty() && op["operation"]["far_wait"] != "";
  })) << op;
  EXPECT_EQ(op["waits"][0]["rank"], 1);
  EXPECT_EQ(op["waits"][0]["node"], "node-b");
  EXPECT_EQ(op["operation"]["far_wait"], "the announcement of rank 1 on node-b");
  const std::string text = op["text"];
  EXPECT_NE(text.find("rank 1 (host:0 on node-b)"), std::string::npos) << text;
  EXPECT_NE(text.find("it waits for the announcement of rank 1 on node-b"), std::string::npos) << text;
  // epctl ops on that node has nothing to say: the rank has submitted nothing.
  EXPECT_NE(text.find("epctl groups --members whether it is stopped"), std::string::npos) << text;
  const auto stopped = [&] {
    return epctl("b", {"groups"})["groups"][0]["members"][1]["client_stopped"] == true;
  };
  EXPECT_FALSE(stopped());
  send_signal(ranks_[1].pid(), SIGSTOP);
  EXPECT_TRUE(eventually(20, stopped));
  EXPECT_NE(at("b").epctl({"groups", "--members"}).out.find("here, process stopped"), std::string::npos);
  send_signal(ranks_[1].pid(), SIGCONT);
  EXPECT_TRUE(eventually(20, [&] { return !stopped(); }));
  const std::string shown = at("a").epctl({"op", op["operation"]["id"]}).out;
  EXPECT_NE(shown.find("node-b"), std::string::npos) << shown;

  const Json doctor = Json::parse(at("a").epctl({"--json", "doctor"}).out, nullptr, false);
  const auto level = [&](const std::string& name) -> std::string {
    for (const Json& check : doctor["checks"]) {
      if (check["name"] == name) return check["level"];
    }
    return "no such check";
  };
  EXPECT_EQ(level("network host:0"), "ok") << doctor;
  EXPECT_EQ(level("network host:0 node-b host:0"), "ok") << doctor;

  stage_->go.open();
  expect_all_ok(wait_all(ranks_, 60));
  EXPECT_TRUE(eventually(20, [&] { return epctl("a", {"network"})["far_engines"][0]["state"] == "idle"; }));
}

TEST(NodesNetworkAlone, ADaemonInNoClusterSaysSo) {
  Daemon daemon{DaemonOptions{}};
  ASSERT_TRUE(daemon.start());
  const CommandResult result = daemon.epctl({"network"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.err.find("UNSUPPORTED: this daemon is in no cluster"), std::string::npos) << result.err;
  daemon.stop();
}

// Reads a file in /proc/PID.
std::string contents(pid_t pid, const std::string& name) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/" + name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_tcp_and_ucx(Daemon& daemon, bool expected) {
  std::size_t ports = 0;
  bool ucx = false;
  for (const pid_t pid : daemon.all_pids()) {
    ports += network_sockets(pid).size();
    const bool mapped = contents(pid, "maps").find("libucp") != std::string::npos;
    EXPECT_FALSE(mapped && pid == daemon.pid()) << "the supervisor never loads UCX";
    ucx = ucx || mapped;
  }
  EXPECT_EQ(ports != 0, expected);
  EXPECT_EQ(ucx, expected);
}

TEST(NodesNetworkAlone, ADaemonInNoClusterHasNoPortAndNoUcx) {
  Daemon daemon{DaemonOptions{}};
  ASSERT_TRUE(daemon.start());
  Case c;
  c.num_ranks = 2;
  c.num_experts = 4;
  c.max_tokens = 8;
  c.hidden = 128;
  c.topk = 2;
  expect_all_ok(run_ranks(2, 30, [&](std::uint32_t rank) {
    const Session session(daemon.socket(), daemon.device(rank));
    const Group group(session, c.config("alone", rank));
    const std::string stats = ScriptRunner(group, c, rank, {.rounds = 2}).run().to_string();
    return stats;
  }));
  expect_tcp_and_ucx(daemon, false);
  daemon.stop();
}

// That the test above can see them.
TEST_F(NodesNetwork, ADaemonInAClusterHasAPortAndItsEnginesUcx) {
  expect_tcp_and_ucx(at("a"), true);
}

}  // namespace
}  // namespace epd::test
