// A network that flips bits and mends its own checksums (flipping_ucp.cpp).
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/script.h"

#include <cstdio>

namespace epd::test {
namespace {

class NodesFlips : public ClusterOfDaemons, public testing::WithParamInterface<const char*> {
 protected:
  std::string network() { return at("b").epctl({"network"}).out; }
  void expect_in_log(const std::string& text) {
    EXPECT_TRUE(eventually(kSoon, [&] { return at("b").log().find(text) != std::string::npos; }))
        << "the log does not say: " << text;
  }

  Shared<Gate> finished_;
};

INSTANTIATE_TEST_SUITE_P(Checks, NodesFlips, testing::Values("crc", "mac"),
                         [](const auto& check) { return std::string(check.param); });

// Each operation is right or fails, and each flip is named and breaks the group, which continues.
TEST_P(NodesFlips, AFlippedBitNeverBecomesAResultThatIsOk) {
  const Settings settings{{"network.peer_timeout_ms", "500"},
                          {"network.check", std::string("\"") + GetParam() + "\""}};
  Settings flipping = settings;
  flipping.emplace_back("network.library", "\"" EPD_TEST_FLIPPING_UCP "\"");
  start("a", flipping);
  start("b", settings);
  await("a", "b", "up");
  await("b", "a", "up");
  const Case c = spanning_case();
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      Daemon& daemon = at(rank == 0 ? "a" : "b");
      const Session session(daemon.socket(), daemon.device(0));
      const Group group(session, c.config("flips", rank));
      ScriptOptions o;
      o.rounds = 300;
      o.recover = true;
      o.finished = &*finished_;
      const ScriptStats stats = ScriptRunner(group, c, rank, o).run();
      for (const auto& [status, count] : stats.failures) RANK_CHECK(status == "ABORTED", stats.to_string());
      RANK_CHECK(stats.resumes >= 3, stats.to_string());
      return stats.to_string();
    });
  }
  const std::vector<RankOutcome> outcomes = wait_all(ranks, 60);
  expect_all_ok(outcomes);
  std::printf("%s\n%s", outcomes[0].text.c_str(), network().c_str());
  expect_in_log("host:0 on node-a sent rows of rank 0 to rank 1 with a wrong " +
                std::string(GetParam() == std::string("mac") ? "MAC" : "checksum"));
  expect_in_log("host:0 on node-a sent a message with a wrong checksum of its header");
  expect_in_log("which has not come for 500 ms though later ones have");
  EXPECT_NE(network().find("checksum 2"), std::string::npos) << network();
}

}  // namespace
}  // namespace epd::test
