// Events of a real daemon, evictions, and the words that go with them.
#include "common/signal.h"
#include "operator_fixture.h"

#include <signal.h>
#include <unistd.h>
#include <algorithm>

namespace epd::test {
namespace {

TEST_F(Operator, EventsTellWhatHappenedAndWhy) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Group group(session, small_config("eventful", rank, 2));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  send_signal(daemon_->engine(0), SIGKILL);
  ASSERT_TRUE(eventually(20, [&] { return event_kinds().contains("group_resumed"); }));
  daemon_->rewrite({{"limits.max_sessions", "9"}});
  daemon_->signal(SIGHUP);
  ranks[1].kill(SIGKILL);
  const auto is_death = [](const json& event) {
    return event["kind"] == "rank_lost" && event["fields"]["rank"] == "1";
  };
  ASSERT_TRUE(eventually(20, [&] {
    const std::vector<json> events = lines({"events"});
    return std::any_of(events.begin(), events.end(), is_death) && event_kinds().contains("config_reloaded");
  }));
  daemon_->rewrite({{"limits.max_sessions", "0"}});
  daemon_->signal(SIGHUP);
  stage->stop.open();
  EXPECT_TRUE(ranks[0].wait(30).ok);
  ASSERT_TRUE(eventually(20, [&] { return event_kinds().contains("config_refused"); }));
  const std::set<std::string> kinds = event_kinds();
  for (const char* kind :
       {"daemon_state", "engine_started", "engine_ready", "engine_died", "session_attached", "session_ended",
        "rank_joined", "rank_lost", "group_broke", "group_resumed", "config_reloaded", "config_refused"}) {
    EXPECT_TRUE(kinds.contains(kind)) << kind;
  }
  std::uint64_t expected = 1;
  bool found = false;
  for (const json& event : lines({"events"})) {
    EXPECT_EQ(event["sequence"], expected++);
    EXPECT_TRUE(eventually(
        20, [&] { return daemon_->log().find(event["text"].get<std::string>()) != std::string::npos; }))
        << "not in the log: " << event;
    if (!is_death(event)) continue;
    found = true;
    EXPECT_EQ(event["fields"]["how"], "died");
    EXPECT_EQ(event["fields"]["pid"], std::to_string(ranks[1].pid()));
  }
  EXPECT_TRUE(found);
}

TEST_F(Operator, AnEvictedSessionIsToldByWhomAndWhy) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Group group(session, small_config("evicted", rank, 2));
    epd_ticket_t ticket = 0;
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    if (rank == 0) {  // waits for rank 1, which is evicted instead
      must(group.dispatch(&args, &ticket, nullptr), "dispatch");
      stage->joined.arrive();
      must(group.wait(ticket, 30000), "dispatch", EPD_RANK_LOST);
      must_say("evicted by operator: it is slow");
      return "";
    }
    stage->joined.arrive();
    RANK_CHECK(eventually(30, [&] { return epd_session_check(session.get()) == EPD_ABORTED; }), "it ends");
    must_say("evicted by operator: it is slow");
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  json victim;
  const json sessions = epctl({"sessions"})["sessions"];
  for (const json& session : sessions)
    if (session["pid"] == ranks[1].pid()) victim = session["session_id"];
  const std::string id = std::to_string(victim.get<std::uint64_t>());
  EXPECT_EQ(daemon_->epctl({"evict", "session", "999999"}).exit_code, 1);
  epctl({"evict", "session", id, "--reason", "it is slow"});
  expect_all_ok(wait_all(ranks, 60));
  EXPECT_EQ(daemon_->epctl({"evict", "session", id}).exit_code, 1) << "it is gone";
  EXPECT_TRUE(event_kinds().contains("evicted"));
}

TEST_F(Operator, AnEvictedRankLosesItsGroupAndKeepsItsSession) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    epd_group_config_t config = small_config("thrown-out", rank, 2);
    {
      const Group group(session, config);
      stage->joined.arrive();
      stage->go.wait_for(1);
      epd_ticket_t ticket = 0;
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      epd_status_t status = group.dispatch(&args, &ticket, nullptr);
      if (status == EPD_OK) status = group.wait(ticket, 30000);
      RANK_CHECK(status == EPD_RANK_LOST, epd_status_name(status));
      must_say("rank 1 (session");
      must_say("was evicted by operator: make room");
    }
    const Group again(session, config);  // the same session may join again
    epd_ticket_t ticket = 0;
    must(epd_noop(again.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(again.wait(ticket, 10000), "noop");
    stage->stop.meet(2);  // who leaves first breaks the group for the other
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  EXPECT_EQ(daemon_->epctl({"evict", "group", "thrown-out", "rank", "2"}).exit_code, 1);
  EXPECT_EQ(daemon_->epctl({"evict", "group", "nobody", "rank", "1"}).exit_code, 1);
  epctl({"evict", "group", "thrown-out", "rank", "1", "--reason", "make room"});
  stage->go.open();
  expect_all_ok(wait_all(ranks, 60));
}

// The second eviction was told that there is no such group, while epctl groups showed it.
TEST_F(Operator, AGroupThatBreaksIsFoundByItsNameUntilItIsGone) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    const Group group(session, small_config("twice", rank, 2));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  epctl({"evict", "group", "twice", "rank", "0", "--reason", "it is slow"});
  EXPECT_EQ(epctl({"groups"})["groups"].size(), 1u);
  const CommandResult again = daemon_->epctl({"evict", "group", "twice", "rank", "0"});
  EXPECT_EQ(again.exit_code, 1);
  EXPECT_NE(again.err.find("(twice) has no rank 0 now (rank 0 was evicted by operator: it is slow)"),
            std::string::npos)
      << again.err;
  const CommandResult other = daemon_->epctl({"evict", "group", "twice", "rank", "1"});
  EXPECT_EQ(other.exit_code, 0) << other.err;
  stage->stop.open();
  expect_all_ok(wait_all(ranks, 60));
}

// Nothing else ends its wait for the others, who continue without it.
TEST_F(Operator, ARankThatIsThrownOutOfAGroupThatGoesOnIsTold) {
  start();
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    epd_group_config_t config = small_config("thrown-out", rank, 2);
    config.policy = EPD_POLICY_DEGRADE;
    const Group group(session, config);
    epd_ticket_t ticket = 0;
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    if (rank == 1) must(group.dispatch(&args, &ticket, nullptr), "dispatch");  // waits for rank 0
    stage->joined.arrive();
    stage->go.wait_for(1);
    epd_result_t result;
    epd_result_init(&result);
    if (rank == 1) {
      must(group.wait(ticket, 20000, &result), "dispatch", EPD_RANK_LOST);
      RANK_CHECK(result.failed_rank == 1, std::to_string(result.failed_rank));
    }
    const auto resumes = [&] {
      epd_resume_info_t info;
      epd_resume_info_init(&info);
      const epd_status_t status = epd_group_resume(group.get(), 20000, &info);
      return rank == 0 ? status == EPD_OK && info.num_active_ranks == 1 : status == EPD_RANK_LOST;
    };
    RANK_CHECK(eventually(10, resumes), epd_last_error());
    if (rank == 1) must_say("rank 1 was evicted by operator: make room");
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  epctl({"evict", "group", "thrown-out", "rank", "1", "--reason", "make room"});
  stage->go.open();
  expect_all_ok(wait_all(ranks, 60));
  EXPECT_FALSE(event_kinds().contains("refused"))
      << "a rank that leaves after it was evicted does as it should";
}

// An operator's reason is read on terminals and in logs, by clients and other operators.
TEST_F(Operator, AReasonIsOneLineOfPrintableText) {
  start();
  Shared<Stage> stage;
  RankProcess rank([&]() -> std::string {
    const Session session(daemon_->socket(), "host:0");
    const Group group(session, small_config("talked-of", 0, 1));
    stage->joined.arrive();
    stage->stop.wait_for(1);
    return "";
  });
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  struct Bad {
    std::string reason;
    std::string says;
  };
  for (const Bad& bad : {Bad{"two\nlines", "has the control character U+000A at byte 3"},
                         Bad{"\x1b[2Jhidden", "U+001B at byte 0"}, Bad{"tab\t", "U+0009 at byte 3"},
                         Bad{"rubbed\x7f", "U+007F at byte 6"},
                         Bad{"\xc2\x9b"
                             "31m",
                             "U+009B at byte 0"},
                         Bad{"a\xe2\x80\xae"
                             "b",
                             "U+202E at byte 1"},
                         Bad{"a\xe2\x80\xa8"
                             "b",
                             "U+2028 at byte 1"},
                         Bad{std::string(161, 'x'), "the reason has 161 bytes"}}) {
    for (const std::vector<std::string>& what :
         {std::vector<std::string>{"evict", "session", "1"}, {"evict", "group", "talked-of", "rank", "0"}}) {
      std::vector<std::string> arguments = what;
      arguments.insert(arguments.end(), {"--reason", bad.reason});
      const CommandResult result = daemon_->epctl(arguments);
      EXPECT_EQ(result.exit_code, 1) << bad.says;
      EXPECT_NE(result.err.find("INVALID_ARGUMENT: the reason"), std::string::npos) << result.err;
      EXPECT_NE(result.err.find(bad.says), std::string::npos) << result.err;
      EXPECT_NE(result.err.find("allowed: 0..160 bytes of printable UTF-8, in one line"), std::string::npos)
          << result.err;
    }
  }
  EXPECT_FALSE(event_kinds().contains("evicted"));
  stage->stop.open();
  EXPECT_TRUE(rank.wait(30).ok);
  // It is judged before it is looked for whom it is about.
  const CommandResult fine =
      daemon_->epctl({"evict", "session", "999", "--reason", "gr\xc3\xbc\xc3\x9f Gott \xf0\x9f\x91\x8b"});
  EXPECT_NE(fine.err.find("there is no session 999"), std::string::npos) << fine.err;
}

// The id won in silence. So one who called a group "3" had operators hit the group with the id 3.
TEST_F(Operator, AGroupNamedLikeTheIdOfAnotherDivertedTheOperator) {
  start();
  Shared<Stage> stage;
  const auto member = [&](const std::string& name) {
    return [&, name]() -> std::string {
      const Session session(daemon_->socket(), "host:0");
      const Group group(session, small_config(name.c_str(), 0, 1));
      stage->joined.arrive();
      stage->stop.wait_for(1);
      return "";
    };
  };
  RankProcess victim(member("victim"));
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 1; }));
  const json first = epctl({"groups"})["groups"][0];
  EXPECT_EQ(first["uid"], ::getuid());
  const std::string id = first["group_id"].dump();
  RankProcess hostile(member(id));
  ASSERT_TRUE(eventually(30, [&] { return stage->joined.count == 2; }));
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"evict", "group", id, "rank", "0"},
        {"set", "group", id, "priority=1"},
        {"waits", id}}) {
    const CommandResult refused = daemon_->epctl(arguments);
    EXPECT_EQ(refused.exit_code, 1) << refused.out;
    for (const std::string& part :
         {std::string("means several groups; allowed: one of id:"), "id:" + id + " (victim, uid ",
          "(" + id + ", uid " + std::to_string(::getuid()) + ")"})
      EXPECT_NE(refused.err.find(part), std::string::npos) << part << " is not in " << refused.err;
  }
  EXPECT_EQ(epctl({"waits", "id:" + id})["groups"][0]["name"], "victim");
  EXPECT_NE(daemon_->epctl({"groups"}).out.find(" USER "), std::string::npos);
  const CommandResult evicted = daemon_->epctl({"evict", "group", "id:" + id, "rank", "0"});
  EXPECT_EQ(evicted.out, "rank 0 of group " + id + " (victim) evicted\n") << evicted.err;
  EXPECT_TRUE(daemon_->epctl({"events", "--group", "id:" + id}).out.find("evicted by") != std::string::npos);
  stage->stop.open();
  EXPECT_TRUE(hostile.wait(30).ok);
  (void)victim.wait(30);
}

}  // namespace
}  // namespace epd::test
