// The sizes that epd_group_bytes and epctl size give before a join are those that the daemon makes.
#include "operator_fixture.h"
#include "support/cases.h"
#include "support/census.h"

#include <string>
#include <vector>

namespace epd::test {
namespace {

class Size : public Operator {
 protected:
  // The group's ranks are there while `look` runs.
  void with_group(const Case& c, const std::function<void()>& look) {
    Shared<Stage> stage;
    std::vector<RankProcess> ranks = start_ranks(c.num_ranks, [&](std::uint32_t rank) -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      const Group group(session, c.config("sized", rank));
      stage->joined.arrive();
      stage->stop.wait_for(1);
      return "";
    });
    ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == c.num_ranks; }));
    look();
    stage->stop.open();
    expect_all_ok(wait_all(ranks, 60));
  }
  static epd_group_bytes_t told(const Case& c) {
    const epd_group_config_t config = c.config("sized", 0);
    epd_group_bytes_t bytes;
    epd_group_bytes_init(&bytes);
    EXPECT_EQ(epd_group_bytes(&config, EPD_DEVICE_KIND_HOST, &bytes), EPD_OK) << epd_last_error();
    return bytes;
  }
  json told_by_epctl(const Case& c) {
    const auto text = [](std::uint32_t number) { return std::to_string(number); };
    const std::vector<std::string> payloads{"bf16", "fp8_cast", "fp8", "opaque"};
    const std::vector<std::string> layouts{"compact", "packed", "expert"};
    const std::vector<std::string> arguments{"size",
                                             "--ranks",
                                             text(c.num_ranks),
                                             "--experts",
                                             text(c.num_experts),
                                             "--tokens",
                                             text(c.max_tokens),
                                             "--hidden",
                                             text(c.hidden),
                                             "--topk",
                                             text(c.topk),
                                             "--depth",
                                             text(c.depth),
                                             "--handles",
                                             text(c.num_handles),
                                             "--biases",
                                             text(c.num_biases),
                                             "--payload",
                                             payloads.at(c.payload),
                                             "--layout",
                                             layouts.at(c.layout),
                                             "--expert-alignment",
                                             text(c.alignment),
                                             "--device-kind",
                                             "host"};
    return epctl(arguments);
  }
};

TEST_F(Size, IsWhatTheDaemonMakes) {
  start();
  std::vector<Case> cases(3);
  cases[1].layout = EPD_LAYOUT_EXPERT;
  cases[1].payload = EPD_PAYLOAD_FP8_CAST;
  cases[1].num_handles = 3;
  cases[1].num_biases = 2;
  cases[1].depth = 4;
  cases[2].layout = EPD_LAYOUT_PACKED;
  cases[2].alignment = 16;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.describe());
    const epd_group_bytes_t bytes = told(c);
    with_group(c, [&] {
      auto made = memory_objects(daemon_->pid());
      EXPECT_EQ(made["epd-user-arena"], c.num_ranks * bytes.user_arena);
      EXPECT_EQ(made["epd-exchange-arena"], c.num_ranks * bytes.exchange_arena);
      EXPECT_EQ(made["epd-board"], c.num_ranks * bytes.board);
      EXPECT_EQ(made["epd-user-arena"] + made["epd-exchange-arena"] + made["epd-board"] + made["epd-results"],
                bytes.group);
      for (const json& session : epctl({"sessions"})["sessions"])
        EXPECT_EQ(session["arena_bytes"], bytes.rank);
      EXPECT_EQ(epctl({"status"})["daemon"]["arena_bytes"], c.num_ranks * bytes.rank);
    });
    const json size = told_by_epctl(c);
    EXPECT_EQ(size["rank"]["user_arena_bytes"], bytes.user_arena);
    EXPECT_EQ(size["rank"]["exchange_arena_bytes"], bytes.exchange_arena);
    EXPECT_EQ(size["rank"]["routing_records_bytes"], bytes.routing_records);
    EXPECT_EQ(size["rank"]["inboxes_bytes"], bytes.inboxes);
    EXPECT_EQ(size["rank"]["board_bytes"], bytes.board);
    EXPECT_EQ(size["rank"]["total_bytes"], bytes.rank);
    EXPECT_EQ(size["rank"]["routing_quota_bytes"], bytes.routing_quota);
    EXPECT_EQ(size["group"]["total_bytes"], bytes.group);
    ASSERT_TRUE(eventually(20, [&] { return daemon_->serves_nobody(); }));
  }
}

// A limit that is what the group counts lets it in, and one byte less does not.
TEST_F(Size, IsWhatTheQuotaCounts) {
  Case c;
  c.num_ranks = 1;
  c.num_experts = 4;
  c.max_tokens = 64;  // more than the group takes with which Daemon::start asks whether it serves
  const epd_group_bytes_t bytes = told(c);
  for (const bool enough : {true, false}) {
    const auto limit = [enough](std::uint64_t needed) {
      return std::to_string(enough ? needed : needed - 1);
    };
    for (const char* which : {"limits.max_arena_bytes_per_user", "limits.max_routing_bytes_per_user"}) {
      SCOPED_TRACE(std::string(which) + (enough ? ", enough" : ", too little"));
      const bool arenas = std::string(which).find("arena") != std::string::npos;
      start({{which, limit(arenas ? bytes.rank : bytes.routing_quota)}});
      RankProcess rank([&]() -> std::string {
        const Session session(daemon_->socket(), daemon_->device(0));
        const epd_group_config_t config = c.config("sized", 0);
        epd_group_t* group = nullptr;
        const epd_status_t status = epd_group_join(session.get(), &config, &group);
        const Group joined(group);
        must(status, "join", enough ? EPD_OK : EPD_RESOURCE_EXHAUSTED);
        return "";
      });
      const RankOutcome outcome = rank.wait(30);
      EXPECT_TRUE(outcome.ok) << outcome.to_string();
      daemon_->stop();
    }
  }
}

}  // namespace
}  // namespace epd::test
