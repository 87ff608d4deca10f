// The access policy and the quotas of a user, through the real daemon: other users are played by processes
// that become them, which needs root.
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace epd::test {
namespace {

using nlohmann::json;

struct User {
  uid_t uid;
  gid_t gid;
  std::vector<gid_t> others;  // supplementary groups
};
constexpr uid_t kAlice = 61001;
constexpr uid_t kBob = 61002;
constexpr gid_t kTeam = 62001;
constexpr gid_t kNobodys = 62002;

class Access : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
  }
  void TearDown() override {
    if (daemon_ && daemon_->running()) daemon_->stop();
  }

  void start(std::vector<std::pair<std::string, std::string>> settings) {
    DaemonOptions options;
    options.devices = 2;
    options.settings = std::move(settings);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    ASSERT_EQ(::chmod(daemon_->directory().c_str(), 0755), 0);
  }

  // The log is written by a thread of its own.
  bool says(const std::string& text) const {
    return eventually(20, [&] { return daemon_->log().find(text) != std::string::npos; });
  }

  // Runs the body as another user, in a process of its own.
  static void as(const User& user, const std::function<void()>& body) {
    expect_all_ok(run_ranks(1, 60, [&](std::uint32_t) -> std::string {
      RANK_CHECK(::setgroups(user.others.size(), user.others.data()) == 0 &&
                     ::setresgid(user.gid, user.gid, user.gid) == 0 &&
                     ::setresuid(user.uid, user.uid, user.uid) == 0,
                 "become user " + std::to_string(user.uid));
      body();
      return "";
    }));
  }

  void refused_attach(const char* device, epd_status_t wanted, const std::vector<std::string>& words) const {
    epd_session_t* session = nullptr;
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = daemon_->socket().c_str();
    options.device = device;
    must(epd_session_attach(&options, &session), "attach", wanted);
    for (const std::string& word : words) must_say(word);
  }

  static void refused_join(const Session& session, const std::string& name, epd_status_t wanted,
                           const std::vector<std::string>& words) {
    epd_group_t* group = nullptr;
    const epd_group_config_t config = small_config(name.c_str(), 0, 1);
    must(epd_group_join(session.get(), &config, &group), "join " + name, wanted);
    for (const std::string& word : words) must_say(word);
    must(epd_session_check(session.get()), "the session lives on");
  }

  // The shared daemon fixture writes key = value lines; a rule is one inline table of them.
  static std::pair<std::string, std::string> rules(const std::string& text) {
    return {"access.rule", "[" + text + "]"};
  }

  std::unique_ptr<Daemon> daemon_;
};

const std::pair<std::string, std::string> kOpenSocket = {"daemon.socket_mode", "\"0666\""};

TEST_F(Access, TheSocketsGroupLetsItsMembersIn) {
  start({{"daemon.socket_mode", "\"0660\""}, {"daemon.socket_group", "\"nogroup\""}});
  const group* entry = ::getgrnam("nogroup");
  ASSERT_NE(entry, nullptr);
  const gid_t nogroup = entry->gr_gid;
  as({kAlice, nogroup, {}}, [&] { const Session session(daemon_->socket(), "host:0"); });
  as({kAlice, kTeam, {nogroup}}, [&] { const Session session(daemon_->socket(), "host:0"); });
  as({kAlice, kTeam, {kNobodys}},
     [&] { refused_attach("host:0", EPD_PERMISSION_DENIED, {daemon_->socket()}); });
}

// The result of one command of another user, in the process that became it.
CommandResult epctl_of(const Daemon& daemon, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {epctl_program(), "--socket", daemon.control()});
  return run_command(arguments, 30);
}

void must_fail(const CommandResult& result, int code, const std::vector<std::string>& words) {
  RANK_CHECK(result.exit_code == code, std::to_string(result.exit_code) + ": " + result.out + result.err);
  for (const std::string& word : words)
    RANK_CHECK(result.err.find(word) != std::string::npos, "\"" + word + "\" in: " + result.err);
}

// Every user who could attach could drain the daemon: one mode and group were both sockets'.
TEST_F(Access, WhoMayAttachMayNotOperate) {
  start({kOpenSocket});
  as({kAlice, kNobodys, {}}, [&] {
    const Session session(daemon_->socket(), "host:0");
    must_fail(epctl_of(*daemon_, {"drain"}), 3, {daemon_->control(), "0600", "daemon.control_socket_group"});
    must_fail(epctl_of(*daemon_, {"status"}), 3, {"daemon.control_socket_group"});
  });
  EXPECT_NE(daemon_->epctl({"status"}).out.find("serving"), std::string::npos);
}

TEST_F(Access, ReadersLookAndOperatorsChangeAndItIsKnownWhoDid) {
  start({{"daemon.control_socket_mode", "\"0660\""},
         {"daemon.control_socket_group", "\"62001\""},
         rules(R"({users = ["61002"], operate = "change"}, {users = [61003], operate = "none"})")});
  as({kAlice, kNobodys, {kTeam}}, [&] {
    for (const char* view :
         {"status", "devices", "sessions", "groups", "ops", "stats", "waits", "events", "config"}) {
      const CommandResult result = epctl_of(*daemon_, {view});
      RANK_CHECK(result.exit_code == 0, std::string(view) + ": " + result.err);
    }
    must_fail(epctl_of(*daemon_, {"drain"}), 1,
              {"PERMISSION_DENIED", "user 61001 may not drain", "access.operate is \"read\"",
               "needed: \"change\""});
    must_fail(epctl_of(*daemon_, {"set", "device", "host:0", "sms=1"}), 1, {"may not set a device"});
    must_fail(epctl_of(*daemon_, {"evict", "session", "1"}), 1, {"may not evict a session"});
    must_fail(epctl_of(*daemon_, {"evict", "group", "g", "rank", "0"}), 1, {"may not evict a rank"});
    must_fail(epctl_of(*daemon_, {"restart", "device", "host:0"}), 1, {"may not restart a device"});
  });
  as({kBob, kNobodys, {kTeam}}, [&] {
    const CommandResult result = epctl_of(*daemon_, {"set", "device", "host:0", "sms=1"});
    RANK_CHECK(result.exit_code == 0, result.err);
  });
  as({61003, kTeam, {}}, [&] {
    must_fail(epctl_of(*daemon_, {"status"}), 1,
              {"user 61003 may not", "access.rule 2 says operate = \"none\""});
  });
  as({kAlice, kNobodys, {}}, [&] { must_fail(epctl_of(*daemon_, {"status"}), 3, {"join group 62001"}); });
  const std::string events = daemon_->epctl({"events"}).out;
  EXPECT_NE(events.find("device set by the operator"), std::string::npos) << events;
  EXPECT_NE(events.find("by_uid=61002"), std::string::npos) << events;
  EXPECT_NE(events.find("operator refused"), std::string::npos) << events;
  EXPECT_TRUE(says("by_uid=61002"));
}

TEST_F(Access, APriorityAboveTheLimitIsRefusedByRule) {
  start({kOpenSocket,
         {"limits.max_priority", "5"},
         rules(R"({users = [61001], max_priority = 0}, {users = [61002]})")});
  const auto join = [&](std::int32_t priority, epd_status_t wanted, const std::vector<std::string>& words) {
    const Session session(daemon_->socket(), "host:0");
    epd_group_config_t config = small_config("priority", 0, 1);
    config.priority = priority;
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join", wanted);
    for (const std::string& word : words) must_say(word);
    if (group != nullptr) epd_group_leave(group);
  };
  as({kAlice, kNobodys, {}}, [&] {
    join(0, EPD_OK, {});
    join(1, EPD_PERMISSION_DENIED, {"user 61001", "priority 1", "access.rule 1 says max_priority = 0"});
  });
  as({kBob, kNobodys, {}}, [&] {
    join(5, EPD_OK, {});
    join(7, EPD_PERMISSION_DENIED, {"user 61002", "limits.max_priority is 5"});
  });
}

// One client that attached and detached erased all other events within a second.
TEST_F(Access, AFloodOfOneUserHidesNothingOfOthers) {
  start({kOpenSocket});
  as({kAlice, kNobodys, {}}, [&] { const Session session(daemon_->socket(), "host:0"); });
  constexpr int kCycles = 6000;
  as({kBob, kNobodys, {}}, [&] {
    for (int i = 0; i < kCycles; ++i) const Session session(daemon_->socket(), "host:1");
  });
  as({kAlice, kNobodys, {}}, [&] { const Session session(daemon_->socket(), "host:0"); });
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  const std::string events = daemon_->epctl({"events"}).out;
  EXPECT_EQ(count(events, "engine ready"), 2) << "the daemon's own, from the start";
  EXPECT_EQ(count(events, "uid=61001"), 4) << "attached, closed; before and after the flood";
  const std::string log = daemon_->log();
  EXPECT_LT(count(log, "uid=61002"), kCycles) << "of two lines for each";
  EXPECT_TRUE(eventually(20, [&] {
    return daemon_->epctl({"events"}).out.find("lines like this one were suppressed") != std::string::npos;
  })) << "what is left out is told";
}

TEST_F(Access, WhoMayAttachJoinAndUseWhat) {
  start({kOpenSocket,
         {"access.default", "\"deny\""},
         rules(R"({users = [0]}, {users = [61001], groups = ["prod-*"], devices = ["host:1"]},)"
               R"( {users = [61002], attach = false}, {unix_groups = [62001]})")});
  as({kAlice, kNobodys, {}}, [&] {
    const Session session(daemon_->socket(), "");  // the daemon's choice: the only one it may use
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    RANK_CHECK(std::string(info.device) == "host:1", info.device);
    refused_attach("host:0", EPD_PERMISSION_DENIED, {"user 61001", "host:0", "access.rule 2", "host:1"});
    const Group group(session, small_config("prod-a", 0, 1));
    refused_join(session, "test-a", EPD_PERMISSION_DENIED,
                 {"user 61001", "test-a", "access.rule 2", "prod-*"});
  });
  as({kBob, kTeam, {}}, [&] {
    refused_attach("host:0", EPD_PERMISSION_DENIED, {"user 61002", "access.rule 3", "attach = false"});
  });
  as({kBob + 1, kNobodys, {kTeam}}, [&] { const Session session(daemon_->socket(), "host:0"); });
  as({kBob + 1, kNobodys, {}}, [&] {
    refused_attach("", EPD_PERMISSION_DENIED, {"user 61003", "access.default"});
  });
  EXPECT_TRUE(says("user 61001 may not join group")) << "refusals are logged";
  EXPECT_TRUE(says("user 61002 may not attach"));
  const std::string config = daemon_->epctl({"config"}).out;
  EXPECT_NE(config.find("access.rule 2"), std::string::npos) << config;
  EXPECT_NE(config.find("prod-*"), std::string::npos) << config;
}

TEST_F(Access, AReloadChangesWhatIsAllowedFromThenOn) {
  start({kOpenSocket});
  Shared<Gate> attached;
  Shared<Gate> reloaded;
  RankProcess alice([&]() -> std::string {
    RANK_CHECK(::setresuid(kAlice, kAlice, kAlice) == 0, "become alice");
    const Session session(daemon_->socket(), "host:0");
    const Group before(session, small_config("mine", 0, 1));
    attached->arrive();
    reloaded->wait_for(1);
    epd_ticket_t ticket = 0;
    must(epd_noop(before.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    must(before.wait(ticket, 10000), "who is in a group stays");
    refused_join(session, "another", EPD_PERMISSION_DENIED,
                 {"user 61001", "access.rule 2", "attach = false"});
    refused_attach("host:0", EPD_PERMISSION_DENIED, {"user 61001", "access.rule 2"});
    return "";
  });
  attached->wait_for(1);
  daemon_->rewrite({rules("{users = [0]}, {attach = false}")});
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(says("configuration reloaded"));
  reloaded->open();
  const RankOutcome outcome = alice.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();

  daemon_->rewrite({rules("{users = [\"no-such-user\"]}")});
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(says("no-such-user")) << "a bad rule refuses the reload";
  as({kAlice, kTeam, {}}, [&] { refused_attach("host:0", EPD_PERMISSION_DENIED, {"access.rule 2"}); });
}

// The limits for one user are the defaults.
TEST_F(Access, OneUserLeavesRoomToAnother) {
  start({kOpenSocket, {"limits.max_sessions", "4"}, {"limits.max_groups", "4"}});
  Shared<Gate> full;
  Shared<Gate> tried;
  RankProcess alice([&]() -> std::string {
    RANK_CHECK(::setresuid(kAlice, kAlice, kAlice) == 0, "become alice");
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<std::unique_ptr<Group>> groups;
    for (const char* name : {"a", "b", "c"}) {
      sessions.push_back(std::make_unique<Session>(daemon_->socket(), "host:0"));
      groups.push_back(std::make_unique<Group>(*sessions.back(), small_config(name, 0, 1)));
    }
    refused_attach("host:0", EPD_RESOURCE_EXHAUSTED,
                   {"user 61001 has 3 sessions", "allowed: 3",
                    "limits.max_sessions_per_user: 3/4 of limits.max_sessions unless the operator sets it"});
    refused_join(*sessions.back(), "d", EPD_RESOURCE_EXHAUSTED,
                 {"user 61001 has 3 groups", "limits.max_groups_per_user: 3/4 of limits.max_groups"});
    full->open();
    tried->wait_for(1);
    return "";
  });
  EXPECT_TRUE(eventually(30, [&] { return full->count > 0; }));
  as({kBob, kTeam, {}}, [&] {
    const Session session(daemon_->socket(), "host:0");
    const Group group(session, small_config("d", 0, 1));
  });
  const json sessions = json::parse(daemon_->epctl({"--json", "sessions"}).out, nullptr, false);
  std::map<std::string, json> of_alice;
  for (const json& user : sessions["users"]) {
    for (const json& limit : user["limits"]) {
      if (user["uid"] == kAlice) of_alice[limit["key"]] = limit;
    }
  }
  ASSERT_EQ(of_alice.size(), 4u) << sessions;
  EXPECT_EQ(of_alice["limits.max_sessions_per_user"]["used"], 3);
  EXPECT_EQ(of_alice["limits.max_sessions_per_user"]["allowed"], 3);
  EXPECT_EQ(of_alice["limits.max_groups_per_user"]["used"], 3);
  EXPECT_EQ(of_alice["limits.max_groups_per_user"]["allowed"], 3);
  for (const char* key : {"limits.max_arena_bytes_per_user", "limits.max_routing_bytes_per_user"}) {
    EXPECT_GT(of_alice[key]["used"].get<std::uint64_t>(), 0u) << key;
    EXPECT_GT(of_alice[key]["allowed"], of_alice[key]["used"]) << key;
  }
  tried->open();
  const RankOutcome outcome = alice.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
}

TEST_F(Access, QuotasOfAUserDoNotTouchOthers) {
  start({kOpenSocket,
         {"limits.max_groups_per_user", "2"},
         rules("{users = [61001], max_sessions = 2, max_groups = 1, max_arena_bytes = \"4MiB\"}")});
  as({kAlice, kTeam, {}}, [&] {
    const Session a(daemon_->socket(), "host:0");
    const Session b(daemon_->socket(), "host:1");
    refused_attach("host:0", EPD_RESOURCE_EXHAUSTED,
                   {"user 61001 has 2 sessions", "allowed: 2", "access.rule 1"});
    {
      const Group group(a, small_config("one", 0, 1));
      refused_join(b, "two", EPD_RESOURCE_EXHAUSTED,
                   {"user 61001 has 1 groups", "allowed: 1", "access.rule 1"});
    }
    epd_group_config_t large = small_config("large", 0, 1);
    large.max_tokens = 4096;
    large.hidden = 1024;
    epd_group_t* group = nullptr;
    RANK_CHECK(eventually(5,
                          [&] {  // leaving ends a moment after epd_group_leave returns
                            must(epd_group_join(a.get(), &large, &group), "join large",
                                 EPD_RESOURCE_EXHAUSTED);
                            return std::string(epd_last_error()).find("bytes of arenas") != std::string::npos;
                          }),
               epd_last_error());
    for (const char* word : {"user 61001 has 0", "allowed: 4194304", "access.rule 1"}) must_say(word);
  });
  as({kBob, kTeam, {}}, [&] {
    const Session session(daemon_->socket(), "host:0");
    const Group one(session, small_config("one", 0, 1));
    const Group two(session, small_config("two", 0, 1));
    refused_join(session, "three", EPD_RESOURCE_EXHAUSTED,
                 {"user 61002 has 2 groups", "allowed: 2", "limits.max_groups_per_user"});
  });
}

}  // namespace
}  // namespace epd::test
