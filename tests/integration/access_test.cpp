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
#include <memory>
#include <string>
#include <vector>

namespace epd::test {
namespace {

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
    epd_attach_options_t options = EPD_ATTACH_OPTIONS_INIT;
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

TEST_F(Access, WhoMayAttachJoinAndUseWhat) {
  start({kOpenSocket,
         {"access.default", "\"deny\""},
         rules(R"({users = [0]}, {users = [61001], groups = ["prod-*"], devices = ["host:1"]},)"
               R"( {users = [61002], attach = false}, {unix_groups = [62001]})")});
  as({kAlice, kNobodys, {}}, [&] {
    const Session session(daemon_->socket(), "");  // the daemon's choice: the only one it may use
    epd_session_info_t info = EPD_SESSION_INFO_INIT;
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
  EXPECT_NE(daemon_->log().find("user 61001 may not join group"), std::string::npos) << "refusals are logged";
  EXPECT_NE(daemon_->log().find("user 61002 may not attach"), std::string::npos);
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
    must(epd_noop(before.get(), 0, &ticket), "noop");
    must(before.wait(ticket, 10000), "who is in a group stays");
    refused_join(session, "another", EPD_PERMISSION_DENIED,
                 {"user 61001", "access.rule 2", "attach = false"});
    refused_attach("host:0", EPD_PERMISSION_DENIED, {"user 61001", "access.rule 2"});
    return "";
  });
  attached->wait_for(1);
  daemon_->rewrite({rules("{users = [0]}, {attach = false}")});
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(
      eventually(10, [&] { return daemon_->log().find("configuration reloaded") != std::string::npos; }));
  reloaded->open();
  const RankOutcome outcome = alice.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();

  daemon_->rewrite({rules("{users = [\"no-such-user\"]}")});
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(10, [&] { return daemon_->log().find("no-such-user") != std::string::npos; }))
      << "a bad rule refuses the reload";
  as({kAlice, kTeam, {}}, [&] { refused_attach("host:0", EPD_PERMISSION_DENIED, {"access.rule 2"}); });
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
