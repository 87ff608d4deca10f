// Daemon and clients in PID, IPC and mount namespaces of their own, as in containers that share a directory.
#include "support/namespaces.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace epd::test {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr double kSeconds = 60;

class Namespaces : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!can_use_devices(GetParam())) GTEST_SKIP() << "no CUDA driver to be opened here";
    if (const std::string why = why_no_namespaces(); !why.empty())
      GTEST_SKIP() << "no namespaces can be made here: " << why;
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-test-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    std::error_code ignored;
    if (!directory_.empty()) std::filesystem::remove_all(directory_, ignored);
  }
  DaemonOptions options() const {
    DaemonOptions options;
    options.devices = 3;
    use_devices(options, GetParam());
    options.settings = patient_settings();
    options.directory = directory_;
    return options;
  }
  static std::string run_script(const Daemon& daemon, const char* group, std::uint32_t rank) {
    ScriptOptions script;
    script.rounds = 8;
    return run_case(daemon.socket(), daemon.device(rank), group, fault_case(kRanks), rank, script);
  }

  std::string directory_;
};
INSTANTIATE_TEST_SUITE_P(Devices, Namespaces, testing::Values("host", "cuda"),
                         [](const auto& tested) { return tested.param; });

TEST_P(Namespaces, ClientsOfSeveralShareAGroup) {
  Daemon daemon(options());
  ASSERT_TRUE(daemon.start());
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto body = [&daemon, rank] { return run_script(daemon, "shared", rank); };
    ranks.push_back(rank == 0 ? RankProcess(body) : contained(body, kSeconds));
  }
  expect_all_ok(wait_all(ranks, kSeconds));
  daemon.stop();
}

TEST_P(Namespaces, TheDeathOfAClientIsSeenByItsPeers) {
  Daemon daemon(options());
  ASSERT_TRUE(daemon.start());
  Shared<Gate> submitted;
  const auto run_to_the_end = [&](std::uint32_t rank) -> std::string {
    const Case c = fault_case(kRanks);
    const Session session(daemon.socket(), daemon.device(rank));
    const Group group(session, c.config("dying", rank));
    ScriptOptions script;
    script.rounds = 100000;
    script.end = EPD_RANK_LOST;
    script.on_submit = [&](std::uint64_t count) {
      if (count == 1) submitted->arrive();
    };
    return ScriptRunner(group, c, rank, script).run().to_string();
  };
  std::vector<RankProcess> ranks;
  ranks.push_back(RankProcess([&] { return run_to_the_end(0); }));
  ranks.push_back(contained([&] { return run_to_the_end(1); }, kSeconds));
  RankProcess victim = contained(
      [&]() -> std::string {
        const Session session(daemon.socket(), daemon.device(2));
        const Group group(session, fault_case(kRanks).config("dying", 2));
        for (;;) sleep_ms(1000);
      },
      kSeconds);
  ASSERT_TRUE(eventually(30, [&] { return submitted->count == kRanks - 1; }));
  victim.kill(SIGKILL);  // and with it PID 1 of its namespace
  expect_all_ok(wait_all(ranks, kSeconds));
  daemon.stop();
}

// As a container whose only program it is. It does not know the numbers of processes outside.
TEST_P(Namespaces, ADaemonThatIsPidOneServesClientsOutside) {
  Shared<Gate> serving;
  Shared<Gate> joined;
  Shared<Gate> shown;
  Daemon daemon(options());  // not started here: its paths
  RankProcess container([&]() -> std::string {
    enter_namespaces();
    DaemonOptions first = options();
    first.in_child = mount_own_proc;
    Daemon inside(std::move(first));
    RANK_CHECK(inside.start(), "the daemon");
    const CommandResult status = inside.epctl({"status", "--json"});
    RANK_CHECK(status.exit_code == 0, status.err);
    RANK_CHECK(nlohmann::json::parse(status.out)["daemon"]["pid"] == 1, status.out);
    serving->open();
    joined->wait_for(1, kSeconds);
    const CommandResult sessions = inside.epctl({"sessions", "--json"});
    RANK_CHECK(sessions.exit_code == 0, sessions.err);
    const auto list = nlohmann::json::parse(sessions.out)["sessions"];
    RANK_CHECK(list.size() == 1 && list[0]["pid"] == 0, sessions.out);
    RANK_CHECK(list[0]["claimed_pid"].get<int>() > 1, sessions.out);
    shown->open();
    sleep_ms(100);
    RANK_CHECK(eventually(20,
                          [&] {
                            const std::string text = inside.epctl({"sessions", "--json"}).out;
                            return nlohmann::json::parse(text)["sessions"].empty();
                          }),
               "the session ends with its client");
    serving->wait_for((1u << 30) + kRanks, kSeconds);  // all ranks are done
    inside.stop();
    RANK_CHECK(!inside.running(), "it has drained");
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return serving->count >= 1u << 30; }));
  RankProcess outside([&]() -> std::string {
    const Session session(daemon.socket(), daemon.device(0));
    joined->arrive();
    for (;;) sleep_ms(1000);
  });
  ASSERT_TRUE(eventually(30, [&] { return shown->count != 0; }));
  outside.kill(SIGKILL);
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto body = [&, rank]() -> std::string {
      const std::string text = run_script(daemon, "beside", rank);
      serving->arrive();
      return text;
    };
    ranks.push_back(rank == 0 ? RankProcess(body) : contained(body, kSeconds));
  }
  expect_all_ok(wait_all(ranks, kSeconds));
  const RankOutcome outcome = container.wait(kSeconds);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
}

}  // namespace
}  // namespace epd::test
