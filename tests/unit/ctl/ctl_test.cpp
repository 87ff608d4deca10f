// epctl, the program, run against a control plane without a daemon.
#include "ctl_fixture.h"

namespace epd::ctl {
namespace {

TEST_F(CtlTest, StatusShowsDaemonAndDevices) {
  start_server();
  const Finished text = epctl({"status"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"epd 0.1.0  serving", "up 1 h 2 m", "2 (17 since start, 1 refused)", "600.0 MiB",
                           "host:0  ready", "host:1  ready", "5.0 GiB", "3 ms ago"}) {
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  }
  EXPECT_TRUE(text.says(attach_));
  EXPECT_EQ(text.err, "");
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos) << "no colours into a pipe";

  const Finished json = epctl({"status", "--json"});
  EXPECT_EQ(json.exit_code, 0);
  const Json document = json.json();
  ASSERT_TRUE(document.is_object()) << json.out;
  EXPECT_EQ(document["daemon"]["state"], "serving");
  EXPECT_EQ(document["daemon"]["sessions"], 2);
  EXPECT_EQ(document["daemon"]["arena_bytes"], std::uint64_t{600} << 20);
  EXPECT_EQ(document["daemon"]["last_reload_error"], "");
  ASSERT_EQ(document["devices"].size(), 2u);
  EXPECT_EQ(document["devices"][0]["name"], "host:0");
  EXPECT_EQ(document["devices"][0]["sleeping"], false);
}

TEST_F(CtlTest, EveryListPrintsATableAndADocument) {
  start_server();
  struct Case {
    std::string command, key, in_text;
    std::size_t size;
  };
  const std::vector<Case> cases{
      {"devices", "devices", "host:1  ready", 2},
      {"sessions", "sessions", "libepd 0.1.0", 2},
      {"groups", "groups", " active ", 2},
      {"ops", "operations", "wait_ready  rank 1 900 us", 2},
      {"config", "entries", "limits.max_sessions     64     file  yes", 5},
  };
  for (const Case& c : cases) {
    const Finished text = epctl({c.command});
    EXPECT_EQ(text.exit_code, 0) << c.command << text.err;
    EXPECT_TRUE(text.says(c.in_text)) << c.command << "\n" << text.out;
    const Finished json = epctl({"--json", c.command});
    EXPECT_EQ(json.exit_code, 0) << c.command;
    ASSERT_TRUE(json.json().is_object()) << json.out;
    EXPECT_EQ(json.json()[c.key].size(), c.size) << c.command;
  }
  tell_server("empty");
  for (const Case& c : cases) {
    const Finished text = epctl({c.command});
    EXPECT_EQ(text.exit_code, 0) << c.command;
    EXPECT_EQ(text.out.substr(0, 3), "no ") << c.command << "\n" << text.out;
    const Json document = epctl({c.command, "--json"}).json();
    ASSERT_TRUE(document.is_object()) << c.command;
    EXPECT_EQ(document[c.key], Json::array()) << c.command;
  }
}

TEST_F(CtlTest, GroupsTellWhatTheyWaitFor) {
  start_server();
  const Finished plain = epctl({"groups"});
  EXPECT_TRUE(plain.says("group 10 (late): waits for 3 ranks: 0, 1, 3")) << plain.out;
  EXPECT_TRUE(plain.says("group 9 (layer-experts): last break: engine of host:1 restarted")) << plain.out;
  EXPECT_TRUE(plain.says("group 10 (late): no coordinator for 2.3 s")) << plain.out;
  EXPECT_FALSE(plain.says("group 9 (layer-experts): no coordinator")) << plain.out;
  EXPECT_FALSE(plain.says("gone"));
  EXPECT_TRUE(plain.says("RANKS  SUM RANKS  EXPERTS")) << plain.out;
  EXPECT_TRUE(epctl({"groups", "--members"}).says("gone"));
  EXPECT_TRUE(epctl({"groups", "--members"}).says("host:1  here, process stopped"));
  EXPECT_TRUE(epctl({"groups", "--members"}).says("3.0 GiB mapped; copied 900 of 4900 (no_room 900)"));
  const Json document = epctl({"groups", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["groups"][0]["shape"]["payload"], "fp8_cast");
  EXPECT_EQ(document["groups"][0]["shape"]["policy"], "fail_fast");
  EXPECT_EQ(document["groups"][0]["shape"]["sum_ranks"], 1u);
  EXPECT_EQ(document["groups"][1]["missing_ranks"], Json({0, 1, 3}));
}

TEST_F(CtlTest, VersionComparesBothSides) {
  const Finished alone = epctl({"version"});
  EXPECT_EQ(alone.exit_code, 3);
  EXPECT_TRUE(alone.says("epctl    0.1.0")) << alone.out;
  const Json alone_json = epctl({"version", "--json"}).json();
  ASSERT_TRUE(alone_json.is_object());
  EXPECT_TRUE(alone_json["daemon"].is_null());
  EXPECT_EQ(alone_json["error"]["class"], "unreachable");

  start_server();
  const Finished both = epctl({"version"});
  EXPECT_EQ(both.exit_code, 0);
  EXPECT_TRUE(both.says("epd      0.1.0")) << both.out;
  const Json document = epctl({"version", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["client"]["layout_hash"], document["daemon"]["layout_hash"]);
  EXPECT_FALSE(document.contains("error"));
}

TEST_F(CtlTest, NoDaemonIsUnreachableWhateverTheCommand) {
  for (const char* command :
       {"status", "devices", "nodes", "network", "sessions", "groups", "ops", "config", "drain"}) {
    const Finished text = epctl({command});
    EXPECT_EQ(text.exit_code, 3) << command;
    EXPECT_EQ(text.out, "") << command;
    EXPECT_TRUE(text.complains("no daemon listens at " + control_ + ": is epd running?")) << text.err;
    const Finished json = epctl({command, "--json"});
    EXPECT_EQ(json.exit_code, 3) << command;
    ASSERT_TRUE(json.json().is_object()) << json.out;
    EXPECT_EQ(json.json()["error"]["class"], "unreachable");
  }
}

TEST_F(CtlTest, ASocketThatWasLeftBehindAndAFileAreToldApart) {
  start_server();
  ASSERT_EQ(::rename(control_.c_str(), (control_ + ".kept").c_str()), 0);
  ASSERT_EQ(server_->finish().exit_code, 0);
  server_.reset();
  ASSERT_EQ(::rename((control_ + ".kept").c_str(), control_.c_str()), 0);
  const Finished stale = epctl({"status"});
  EXPECT_EQ(stale.exit_code, 3);
  EXPECT_TRUE(stale.complains("left behind")) << stale.err;

  ::unlink(control_.c_str());
  std::ofstream(control_) << "text";
  const Finished file = epctl({"status"});
  EXPECT_EQ(file.exit_code, 3);
  EXPECT_TRUE(file.complains("is no socket")) << file.err;
}

TEST_F(CtlTest, TheAttachSocketIsNotAControlSocket) {
  start_server();
  const Finished wrong = epctl({"--socket", attach_, "status"});
  EXPECT_EQ(wrong.exit_code, 2) << "--socket twice";
  const Finished result = Process({EPCTL_PATH, "--socket", attach_, "status"}).finish();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("is not a control socket")) << result.err;
}

TEST_F(CtlTest, ARefusalKeepsStatusAndMessage) {
  start_server();
  tell_server("fail 12 the supervisor is stopping");
  for (const char* command : {"status", "devices", "sessions", "groups", "ops", "config", "version"}) {
    const Finished text = epctl({command});
    EXPECT_EQ(text.exit_code, 1) << command;
    EXPECT_TRUE(text.complains("epctl: ABORTED: the supervisor is stopping")) << text.err;
  }
  const Finished json = epctl({"status", "--json"});
  EXPECT_EQ(json.exit_code, 1);
  ASSERT_TRUE(json.json().is_object()) << json.out;
  EXPECT_EQ(json.json()["error"]["class"], "refused");
  EXPECT_EQ(json.json()["error"]["status"], "ABORTED");
  EXPECT_EQ(json.json()["error"]["message"], "the supervisor is stopping");
  EXPECT_EQ(json.err, "");
}

TEST_F(CtlTest, TheSocketComesFromTheEnvironmentToo) {
  start_server();
  const std::vector<std::string> environment{"EPD_CONTROL_SOCKET=" + control_};
  const Finished result = Process({EPCTL_PATH, "status"}, environment).finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Finished flag = epctl({"status"}, {"EPD_CONTROL_SOCKET=/nowhere/control.sock"});
  EXPECT_EQ(flag.exit_code, 0) << "the flag counts more: " << flag.err;
}

TEST_F(CtlTest, ADrainDuringADrainTellsTheTimeThatIsLeft) {
  start_server();
  tell_server("draining");
  const Finished result = epctl({"drain", "--timeout-ms", "1500"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.says("may finish within 700 ms")) << result.out;
}

TEST_F(CtlTest, DrainWaitsUntilTheDaemonHasGone) {
  start_server();
  const Finished result = epctl({"drain", "--wait", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  EXPECT_EQ(document["daemon"]["state"], "draining");
  EXPECT_EQ(document["gone"], true);
  EXPECT_NE(::access(control_.c_str(), F_OK), 0);
}

// Its ports were still taken when the next daemon started.
TEST_F(CtlTest, DrainWaitsForTheProcessToo) {
  start_server();
  tell_server("lingers");
  const Finished result = epctl({"drain", "--wait"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.says("the daemon has gone")) << result.out;
  EXPECT_TRUE(server_->has_ended());
}

// epctl said that it had gone, as if the drain had ended.
TEST_F(CtlTest, ADaemonThatDiesWhileItDrainsHasNotGone) {
  start_server();
  tell_server("dies");
  const Finished result = epctl({"drain", "--wait"});
  EXPECT_EQ(result.exit_code, 3) << result.out;
  EXPECT_TRUE(result.complains("has died before its end: its socket is left behind")) << result.err;
  EXPECT_FALSE(result.says("has gone")) << result.out;
}

TEST_F(CtlTest, WrongUsageIsExitCode2) {
  const std::vector<std::vector<std::string>> wrong{{},
                                                    {"frobnicate"},
                                                    {"status", "extra"},
                                                    {"--timeout-ms", "0", "status"},
                                                    {"--timeout-ms", "soon", "status"},
                                                    {"drain", "--timeout-ms", "-1"},
                                                    {"watch", "--interval", "nan"},
                                                    {"watch", "--interval", "-NAN", "--count", "1"},
                                                    {"watch", "--interval", "inf"},
                                                    {"status", "--wait"}};
  for (const auto& arguments : wrong) {
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
    EXPECT_FALSE(result.err.empty());
  }
}

TEST_F(CtlTest, EveryCommandHasHelpWithExamples) {
  const Finished main = epctl({"--help"});
  EXPECT_EQ(main.exit_code, 0);
  EXPECT_TRUE(main.says("EXIT CODES"));
  for (const char* command :
       {"status", "devices", "sessions", "groups", "ops", "op", "stats", "waits", "events", "watch", "config",
        "set", "evict", "restart", "size", "drain", "doctor", "version", "completion"}) {
    EXPECT_TRUE(main.says(command));
    const Finished help = epctl({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_TRUE(help.says("EXAMPLES") && help.says(std::string("epctl ") + command)) << help.out;
  }
  EXPECT_TRUE(epctl({"--version"}).says("epctl 0.1.0"));
}

std::optional<Json> find_check(const Json& document, const std::string& name) {
  for (const Json& check : document["checks"])
    if (check["name"] == name) return check;
  return std::nullopt;
}

TEST_F(CtlTest, DoctorOfAHealthyDaemonFindsNoFailure) {
  start_server();
  const Finished result = epctl({"doctor", "--json"});
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  // Not "version": the server here calls itself 0.1.0, and epctl its commit's.
  for (const char* name : {"control_socket", "daemon", "abi", "state", "configuration", "attach_socket",
                           "device host:0", "device host:1"}) {
    const auto check = find_check(document, name);
    ASSERT_TRUE(check.has_value()) << name;
    EXPECT_EQ((*check)["level"], "ok") << check->dump();
  }
  for (const char* name :
       {"open_files", "locked_memory", "shared_memory", "huge_pages", "memory", "swap", "cores"}) {
    EXPECT_TRUE(find_check(document, name).has_value()) << name;
  }
  EXPECT_EQ(result.exit_code, document["fail"] == 0 ? 0 : 4);
  const Finished text = epctl({"doctor"});
  EXPECT_TRUE(text.says("OK    control_socket")) << text.out;
}

TEST_F(CtlTest, DoctorFindsAnEngineThatHangsAndARefusedReload) {
  start_server();
  tell_server("sick");
  const Finished result = epctl({"doctor", "--json"});
  EXPECT_EQ(result.exit_code, 4);
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  EXPECT_EQ((*find_check(document, "device host:1"))["level"], "fail");
  EXPECT_EQ((*find_check(document, "device host:0"))["level"], "ok");
  EXPECT_EQ((*find_check(document, "configuration"))["level"], "warn");
  const Finished text = epctl({"doctor"});
  EXPECT_EQ(text.exit_code, 4);
  EXPECT_TRUE(text.says("FAIL  device host:1")) << text.out;
  EXPECT_TRUE(text.says("-> its engine (pid 4242) hangs")) << text.out;
}

// A stopped engine or client was already named.
TEST_F(CtlTest, AStoppedDaemonWasOnlySaidNotToAnswer) {
  start_server();
  server_->signal(SIGSTOP);
  const Finished status = epctl({"--timeout-ms", "300", "status"});
  EXPECT_EQ(status.exit_code, 3);
  EXPECT_TRUE(status.complains("is stopped by a signal or a debugger: kill -CONT ")) << status.err;
  // Where another daemon than the default one takes clients, only that daemon knows.
  const Json document = epctl({"--timeout-ms", "300", "doctor", "--json"}).json();
  EXPECT_FALSE(find_check(document, "attach_socket")) << document;
  EXPECT_NE((*find_check(document, "daemon"))["advice"].get<std::string>().find("kill -CONT"),
            std::string::npos);
  server_->signal(SIGCONT);
}

TEST_F(CtlTest, DoctorWithoutADaemonStillLooksAtTheHost) {
  const Finished result = epctl({"doctor", "--json"}, {"EPD_SOCKET=" + attach_});
  EXPECT_EQ(result.exit_code, 4);
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  for (const char* name : {"control_socket", "daemon", "attach_socket"}) {
    const auto check = find_check(document, name);
    ASSERT_TRUE(check.has_value()) << name;
    EXPECT_EQ((*check)["level"], "fail");
    EXPECT_NE((*check)["advice"], "") << "a failure comes with what to do";
  }
  EXPECT_NE((*find_check(document, "attach_socket"))["text"].get<std::string>().find(attach_),
            std::string::npos);
  EXPECT_TRUE(find_check(document, "memory").has_value());
}

TEST_F(CtlTest, OfSeveralAttachSocketsDoctorLookedAtTheFirstOnly) {
  const auto said = [&](const std::string& paths) {
    const Json document = epctl({"doctor", "--json"}, {"EPD_SOCKET=" + paths}).json();
    return (*find_check(document, "attach_socket"))["text"].get<std::string>();
  };
  EXPECT_EQ(said("/nonexistent/a:/dev/null").find("/dev/null "), 0u) << "it is there, as far as clients know";
  EXPECT_EQ(said("/nonexistent/a:/nonexistent/b"), "/nonexistent/a does not exist");
}

}  // namespace
}  // namespace epd::ctl
