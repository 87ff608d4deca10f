// The configuration of a daemon that runs: read again at a signal or by epctl, options that an operator sets.
#include "operator_fixture.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace epd::test {
namespace {

std::string value_of(const json& config, const std::string& key) {
  for (const json& entry : config["entries"])
    if (entry["key"] == key) return entry["value"];
  return "no such key";
}

// Attaches a session beside another one.
void expect_second_session(const Daemon& daemon, epd_status_t expected) {
  expect_all_ok(run_ranks(1, 30, [&](std::uint32_t) -> std::string {
    const Session session(daemon.socket(), "host:0");
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = daemon.socket().c_str();
    epd_session_t* other = nullptr;
    must(epd_session_attach(&options, &other), "the second session", expected);
    if (other != nullptr) epd_session_detach(other);
    return "";
  }));
}

// A directory in the file's place ended the daemon, and all jobs with it.
TEST_F(Operator, AConfigurationThatCanNotBeReadLeavesTheDaemonAsItWas) {
  start({{"limits.max_sessions", "5"}});
  const std::string file = daemon_->directory() + "/epd.toml";
  ASSERT_EQ(::access(file.c_str(), R_OK), 0);
  ASSERT_EQ(::rename(file.c_str(), (file + ".aside").c_str()), 0);
  const auto refused = [&](const std::string& why) {
    daemon_->signal(SIGHUP);
    EXPECT_TRUE(eventually(20, [&] {
      const std::string error = epctl({"status"})["daemon"]["last_reload_error"];
      return error.find(file) != std::string::npos && error.find(why) != std::string::npos;
    })) << epctl({"status"})["daemon"];
    EXPECT_EQ(value_of(epctl({"config"}), "limits.max_sessions"), "5");
  };
  ASSERT_EQ(::mkdir(file.c_str(), 0755), 0);
  refused("directory");
  ASSERT_EQ(::rmdir(file.c_str()), 0);
  refused("does not exist");
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  refused("pipe");
  ASSERT_EQ(::unlink(file.c_str()), 0);
  ASSERT_EQ(::rename((file + ".aside").c_str(), file.c_str()), 0);
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(20, [&] { return epctl({"status"})["daemon"]["last_reload_error"] == ""; }));
  const CommandResult check = run_command({daemon_program(), "check-config", "--config", "/tmp"}, 20);
  EXPECT_EQ(check.exit_code, 2);
  EXPECT_NE(check.err.find("directory"), std::string::npos) << check.err;
}

// Log rotation sends them to many.
TEST_F(Operator, SignalsForWhichThereIsNoUseDoNothing) {
  start();
  for (const int signal : {SIGUSR1, SIGUSR2, SIGPIPE}) daemon_->signal(signal);
  daemon_->signal(SIGHUP);  // is noticed after them
  EXPECT_TRUE(eventually(10, [&] { return epctl({"status"})["daemon"]["config_generation"] == 2; }));
  EXPECT_EQ(epctl({"status"})["daemon"]["state"], "serving");
}

// The kernel sent a signal that ended it, without a word.
TEST_F(Operator, ALimitOfFileSizesRefusesAJoinAndEndsNoDaemon) {
  start();
  const rlimit limit{1 << 20, 1 << 20};
  ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
  expect_all_ok(run_ranks(1, 30, [&](std::uint32_t) -> std::string {
    const Session session(daemon_->socket(), "host:0");
    epd_group_config_t config = small_config("large", 0, 1);
    config.max_tokens = 4096;
    config.hidden = 4096;
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join", EPD_RESOURCE_EXHAUSTED);
    must_say("RLIMIT_FSIZE");
    const Group small(session, small_config("small", 0, 1));
    return "";
  }));
  EXPECT_EQ(epctl({"status"})["daemon"]["state"], "serving");
}

TEST_F(Operator, AReloadIsAppliedOrRefusedAsAWhole) {
  start({{"limits.max_sessions", "5"}});
  EXPECT_EQ(value_of(epctl({"config"}), "limits.max_sessions"), "5");
  daemon_->rewrite({{"limits.max_sessions", "1"}});
  daemon_->signal(SIGHUP);
  EXPECT_TRUE(eventually(10, [&] { return epctl({"status"})["daemon"]["config_generation"] == 2; }));
  EXPECT_EQ(value_of(epctl({"config"}), "limits.max_sessions"), "1");
  expect_second_session(*daemon_, EPD_RESOURCE_EXHAUSTED);

  daemon_->rewrite({{"limits.max_sessions", "7"}, {"daemon.socket_mode", "\"0600\""}});
  daemon_->signal(SIGHUP);
  std::string error;
  EXPECT_TRUE(eventually(10, [&] {
    error = epctl({"status"})["daemon"]["last_reload_error"];
    return !error.empty();
  }));
  EXPECT_NE(error.find("daemon.socket_mode"), std::string::npos) << error;
  EXPECT_EQ(value_of(epctl({"config"}), "limits.max_sessions"), "1") << "half a reload was applied";
  EXPECT_EQ(epctl({"status"})["daemon"]["config_generation"], 2);
}

TEST_F(Operator, EpctlReloadsAndSaysWhatChangedOrWhyNot) {
  start({{"limits.max_sessions", "5"}});
  daemon_->rewrite({{"limits.max_sessions", "6"}});
  const json reloaded = epctl({"reload"});
  EXPECT_EQ(reloaded["generation"], 2);
  ASSERT_EQ(reloaded["changes"].size(), 1u) << reloaded;
  EXPECT_EQ(reloaded["changes"][0]["key"], "limits.max_sessions");
  EXPECT_EQ(reloaded["changes"][0]["before"], "5");
  EXPECT_EQ(reloaded["changes"][0]["after"], "6");
  EXPECT_TRUE(eventually(20, [&] {
    return daemon_->log().find("changed=\"limits.max_sessions 5 -> 6\"") != std::string::npos;
  }));

  daemon_->rewrite({{"limits.max_sessions", "0"}});
  const CommandResult bad = daemon_->epctl({"reload"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.err.find("INVALID_ARGUMENT: limits.max_sessions in "), std::string::npos) << bad.err;
  EXPECT_NE(bad.err.find(" is \"0\"; allowed: 1..65536\n"), std::string::npos) << bad.err;
  daemon_->rewrite({{"limits.max_sessions", "8"}, {"daemon.socket_mode", "\"0600\""}});
  const CommandResult fixed = daemon_->epctl({"reload"});
  EXPECT_EQ(fixed.exit_code, 1);
  EXPECT_NE(fixed.err.find("daemon.socket_mode changed"), std::string::npos) << fixed.err;
  EXPECT_EQ(value_of(epctl({"config"}), "limits.max_sessions"), "6");
  EXPECT_EQ(epctl({"status"})["daemon"]["config_generation"], 2);
}

TEST_F(Operator, LimitsAreSetWhileTheDaemonRunsAndUnset) {
  start({{"limits.max_sessions", "5"}});
  const CommandResult set = daemon_->epctl({"set", "limits", "max_sessions=1"});
  EXPECT_EQ(set.exit_code, 0) << set.err;
  EXPECT_NE(set.out.find("limits.max_sessions: 5 -> 1"), std::string::npos) << set.out;
  const auto origin = [this] {
    const json config = epctl({"config"});
    for (const json& entry : config["entries"]) {
      if (entry["key"] == "limits.max_sessions") return entry["origin"].get<std::string>();
    }
    return std::string("none");
  };
  EXPECT_EQ(origin(), "operator");
  expect_second_session(*daemon_, EPD_RESOURCE_EXHAUSTED);
  daemon_->rewrite({{"limits.max_groups", "9"}});
  EXPECT_EQ(daemon_->epctl({"reload"}).exit_code, 0);
  expect_second_session(*daemon_, EPD_RESOURCE_EXHAUSTED);  // the file says nothing new about it
  const CommandResult unset = daemon_->epctl({"set", "limits", "max_sessions=unset"});
  EXPECT_EQ(unset.exit_code, 0) << unset.err;
  EXPECT_EQ(unset.out, "unset:\n  limits.max_sessions: 1 -> 5\n");
  expect_second_session(*daemon_, EPD_OK);
  EXPECT_EQ(origin(), "file");

  const CommandResult bad = daemon_->epctl({"set", "limits", "max_groups=3", "max_sessions=many"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_NE(bad.err.find("limits.max_sessions is \"many\"; allowed: 1..65536"), std::string::npos) << bad.err;
  EXPECT_EQ(value_of(epctl({"config"}), "limits.max_groups"), "9") << "half of it was set";
  const CommandResult unknown = daemon_->epctl({"set", "limits", "max_session=3"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("\"max_session\" is no option of limits.*; allowed: max_arena_bytes, "),
            std::string::npos)
      << unknown.err;
}

TEST_F(Operator, ABadConfigurationIsRefusedByKeyAndValue) {
  start();
  const std::string directory = daemon_->directory();
  daemon_->stop();
  daemon_->rewrite({{"limits.max_sessions", "0"}});
  const std::vector<std::string> serve = {daemon_program(), "serve", "--config", directory + "/epd.toml"};
  CommandResult result = run_command(serve, 20);
  EXPECT_GT(result.exit_code, 0);
  EXPECT_NE(result.err.find("limits.max_sessions"), std::string::npos) << result.err;
  daemon_->rewrite({{"limits.max_sessions", "3"}, {"limits.max_sesions", "3"}});
  result = run_command(serve, 20);
  EXPECT_GT(result.exit_code, 0);
  EXPECT_NE(result.err.find("limits.max_sesions"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace epd::test
