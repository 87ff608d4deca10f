// epctl's tools for operators: op, stats, events, watch, set, evict, completion.
#include "ctl_fixture.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <sstream>

namespace epd::ctl {
namespace {

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> documents;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) documents.push_back(Json::parse(line, nullptr, false));
  return documents;
}

TEST_F(CtlTest, OpTellsWhomItWaitsForAndWhy) {
  start_server();
  const Finished text = epctl({"op", "11:500"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part :
       {"operation 11:500  dispatch 77 of group 9 (layer-experts), epoch 3", "stage      wait_ready",
        "deadline   in 29.0 s", "history    seen +2 us planning +3 us",
        "why        waits for 0 ms: rank 1 (session 12, pid 7012, host:1) has not submitted it"}) {
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  }
  EXPECT_FALSE(text.says("  waits for  ")) << "the reason was said twice: " << text.out;
  const Json document = epctl({"op", "11:500", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["operation"]["id"], "11:500");
  EXPECT_EQ(document["waits"][0]["client_stopped"], true);
  const Finished missing = epctl({"op", "11:9"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_TRUE(missing.complains("NOT_FOUND")) << missing.err;
  EXPECT_EQ(epctl({"op"}).exit_code, 2);
}

TEST_F(CtlTest, StatsShowCountersAndPercentiles) {
  start_server();
  const Finished text = epctl({"stats"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"SESSION", "GROUP", "1.0 MiB", "RANK_LOST 3", "INVALID_ARGUMENT 2"})
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  EXPECT_FALSE(text.says("RANK  SESSION"));
  EXPECT_TRUE(epctl({"stats", "--ranks"}).says("RANK  SESSION"));
  const Json document = epctl({"stats", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["sessions"].size(), 2u);
  EXPECT_EQ(document["groups"][0]["statistics"]["completed"], 380);
  EXPECT_EQ(document["ranks"][0]["statistics"]["done"]["buckets"].size(), 2u);
}

TEST_F(CtlTest, WaitsShowRanksAndWhoWaitedForWhom) {
  start_server();
  const Finished text = epctl({"waits", "layer-experts"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part :
       {"group 9 (layer-experts)", "WAITED FOR", "37", "3000", "FOR 0  FOR 1", "1.5 s", "1.2 s"})
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  const Finished all = epctl({"waits"});
  EXPECT_EQ(all.exit_code, 0) << all.err;
  EXPECT_TRUE(all.says("WAITED FOR")) << all.out;
  EXPECT_FALSE(all.says("FOR 0")) << "pairs are for one group";
  const Json document = epctl({"waits", "layer-experts", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["groups"][0]["ranks"][1]["last_arrivals"], 3);
  EXPECT_EQ(document["groups"][0]["pairs"][0]["peer"], 0);
  EXPECT_EQ(document["groups"][0]["pairs"][0]["ready_us"], 1'250'000);
  const Finished nameless = epctl({"waits", ""});
  EXPECT_EQ(nameless.exit_code, 2) << nameless.out;
  EXPECT_NE(nameless.err.find("is empty; allowed: a name, an id or id:ID"), std::string::npos)
      << nameless.err;
  const Finished missing = epctl({"waits", "nobody"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_TRUE(missing.complains("NOT_FOUND")) << missing.err;
}

TEST_F(CtlTest, EventsPrintOneLineEach) {
  start_server();
  const Finished text = epctl({"events", "--since", "1"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_FALSE(text.says("session attached"));
  EXPECT_TRUE(text.says("rank joined  group=9  text=\"rank 1 died\"  who=\"x\\\" level=\\\"error\\\\\"\n"))
      << text.out;
  const Finished json = epctl({"events", "--json"});
  const std::vector<Json> lines = json_lines(json.out);
  ASSERT_EQ(lines.size(), 3u) << json.out;
  EXPECT_EQ(lines[2]["sequence"], 3);
  EXPECT_EQ(lines[2]["kind"], "group_broke");
  EXPECT_EQ(lines[2]["text"], "group breaks");
  EXPECT_EQ(lines[2]["fields"]["text"], "rank 1 died");
  EXPECT_EQ(epctl({"events", "--since", "99"}).exit_code, 1);
}

// 4096 lines came, and all that could be named was a number.
TEST_F(CtlTest, EventsCouldNotBeNarrowedDown) {
  start_server();
  const auto count = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"events", "--json"});
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out.empty() ? 0 : json_lines(result.out).size();
  };
  EXPECT_EQ(count({"--last", "2"}), 2u);
  EXPECT_TRUE(epctl({"events", "--last", "1"}).says("group breaks"));
  EXPECT_EQ(count({"--last", "9"}), 3u);
  EXPECT_EQ(count({"--group", "9"}), 3u);
  EXPECT_EQ(count({"--group", "8"}), 0u);
  EXPECT_EQ(count({"--node", "node-b"}), 0u);
  EXPECT_EQ(count({"--since", "0s"}), 0u);
  EXPECT_EQ(count({"--since", "90000d"}), 3u);
  const Finished wrong = epctl({"events", "--since", "1y"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(wrong.complains("allowed: the number of an event, or 90s, 5m, 1h, 2d")) << wrong.err;
  Process follower({EPCTL_PATH, "--socket", control_, "events", "--follow", "--last", "1"});
  EXPECT_TRUE(follower.read_until("3  "));
  tell_server("event news");
  EXPECT_TRUE(follower.read_until("news"));
}

// The log says the zone, and the two were compared.
TEST_F(CtlTest, StampsOfEventsHadNoZone) {
  start_server();
  const Finished far = epctl({"events", "--last", "1"}, {"TZ=EST5"});
  EXPECT_TRUE(far.says("2023-11-14 17:13:20.000-05:00")) << far.out;
  EXPECT_TRUE(epctl({"events", "--last", "1"}, {"TZ=UTC"}).says("2023-11-14 22:13:20.000+00:00"));
}

// The daemon was asked, and its refusal is exit code 1.
TEST_F(CtlTest, AMalformedOperationWasTheDaemonsRefusal) {
  for (const char* id : {"1", "abc", "1:", ":1", "1:2:3", "01:2"}) {
    const Finished result = epctl({"op", id});
    EXPECT_EQ(result.exit_code, 2) << id;
    EXPECT_TRUE(result.complains("allowed: SESSION:TICKET")) << result.err;
  }
}

TEST_F(CtlTest, EventsFollowAndTellOfTheLost) {
  start_server();
  for (int i = 0; i < 10; ++i) tell_server("event number " + std::to_string(i));
  Process follower({EPCTL_PATH, "--socket", control_, "events", "--follow", "--since", "1"});
  EXPECT_TRUE(follower.read_until("... 4 events here no longer remembered\n6 "));
  EXPECT_TRUE(follower.read_until("number 9"));
  tell_server("event news");
  EXPECT_TRUE(follower.read_until("news"));
}

TEST_F(CtlTest, WatchPrintsBlocksOfTextIntoAPipe) {
  start_server();
  const Finished text = epctl({"watch", "--interval", "0.05", "--count", "2"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos);
  for (const char* part : {"epd 0.1.0  serving", "DEVICE  STATE  SMS", "host:1  ready", "layer-experts",
                           "OPS/S", "slowest operation 11:500 (dispatch of group 9, rank 0"}) {
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  }
  const Finished json = epctl({"watch", "--interval", "0.05", "--count", "3", "--json"});
  const std::vector<Json> frames = json_lines(json.out);
  ASSERT_EQ(frames.size(), 3u) << json.out;
  for (const Json& frame : frames) {
    ASSERT_TRUE(frame.is_object());
    EXPECT_EQ(frame["devices"].size(), 2u);
    EXPECT_EQ(frame["sessions"][0]["ops_per_s"], 0.0) << "the fake's counters stand still";
    EXPECT_EQ(frame["slowest"]["operation"]["id"], "11:500");
  }
  tell_server("empty");
  EXPECT_TRUE(epctl({"watch", "--interval", "0.05", "--count", "1"}).says("no operation waits"));
  EXPECT_EQ(epctl({"watch", "--interval", "0"}).exit_code, 2);
}

TEST_F(CtlTest, SetAndEvictSayWhatTheyDid) {
  start_server();
  const std::string sms_of_host_0 = epctl({"devices", "--json"}).json()["devices"][0]["sms"].dump();
  const Finished device = epctl({"set", "device", "host:0", "sms=4"});
  EXPECT_EQ(device.exit_code, 0) << device.err;
  EXPECT_EQ(device.out, "host:0: sms " + sms_of_host_0 + " -> 4\n");
  const Json group = epctl({"--json", "set", "group", "layer-experts", "sms=2", "priority=-5"}).json();
  ASSERT_TRUE(group.is_object());
  EXPECT_EQ(group["set"]["priority"], -5);
  EXPECT_EQ(group["group_id"], 9) << "the answer says which group was meant";
  EXPECT_EQ(group["name"], "layer-experts");
  EXPECT_FALSE(group.contains("this_node_only"));
  EXPECT_EQ(
      epctl({"set", "group", "late", "priority=5"}).out,
      "group 10 (late): priority 0 -> 5 for its ranks on this node; those on other nodes keep theirs\n");
  EXPECT_EQ(epctl({"--json", "set", "group", "10", "priority=5"}).json()["this_node_only"], true);
  EXPECT_EQ(epctl({"evict", "session", "11", "--reason", "too slow"}).out, "session 11 evicted\n");
  EXPECT_EQ(epctl({"evict", "group", "late", "rank", "2"}).out, "rank 2 of group 10 (late) evicted\n");
  EXPECT_EQ(epctl({"restart", "device", "host:1"}).out, "host:1 restarts\n");
  ASSERT_TRUE(server_->write("asked\n"));
  for (const char* line :
       {"set device host:0 sms=4\n", "set group layer-experts sms=2 priority=-5\n",
        "evict session 11 too slow\n", "evict group late rank 2 \n", "restart device host:1\n", "done\n"}) {
    EXPECT_TRUE(server_->read_until(line)) << line;
  }
}

TEST_F(CtlTest, EventsOfLessImportanceCanBeLeftOut) {
  start_server();
  const Finished all = epctl({"events"});
  const Finished warnings = epctl({"events", "--level", "warning"});
  EXPECT_EQ(warnings.exit_code, 0) << warnings.err;
  EXPECT_LT(warnings.out.size(), all.out.size());
  EXPECT_EQ(epctl({"events", "--level", "loud"}).exit_code, 2);
}

// A daemon that was killed leaves its sockets.
TEST_F(CtlTest, DoctorKnowsSocketsThatWereLeftBehind) {
  for (const auto& [path, type] : {std::pair(control_, SOCK_STREAM), {attach_, SOCK_SEQPACKET}}) {
    const int fd = ::socket(AF_UNIX, type, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ::close(fd);
  }
  const Finished doctor = epctl({"doctor"}, {"EPD_SOCKET=" + attach_});
  EXPECT_EQ(doctor.exit_code, 4);
  EXPECT_TRUE(doctor.says(control_ + " was left behind")) << doctor.out;
  EXPECT_TRUE(doctor.says(attach_ + " was left behind")) << doctor.out;
}

TEST_F(CtlTest, WhatWasSetCanBeUnset) {
  start_server();
  EXPECT_TRUE(epctl({"set", "device", "host:0", "sms=unset"}).says(" -> unset\n"));
  const Json group = epctl({"--json", "set", "group", "9", "sms=unset", "priority=unset"}).json();
  ASSERT_TRUE(group.is_object());
  EXPECT_TRUE(group["set"]["sms"].is_null());
  EXPECT_EQ(epctl({"set", "limits", "max_groups=unset"}).exit_code, 0);
  ASSERT_TRUE(server_->write("asked\n"));
  for (const char* line : {"set device host:0 sms=(unset)\n", "set group 9 sms=(unset) priority=(unset)\n",
                           "set options limits.max_groups=(unset)\n", "done\n"}) {
    EXPECT_TRUE(server_->read_until(line)) << line;
  }
}

TEST_F(CtlTest, LogAndLimitsAreSetAsTheConfigurationWritesThem) {
  start_server();
  const Finished limits = epctl({"set", "limits", "max_sessions=8", "max_arena_bytes=64GiB"});
  EXPECT_EQ(limits.exit_code, 0) << limits.err;
  EXPECT_TRUE(limits.says("limits.max_sessions: old -> 8")) << limits.out;
  const Json log = epctl({"--json", "set", "log", "level=info,session=debug"}).json();
  ASSERT_TRUE(log.is_object());
  EXPECT_EQ(log["changes"][0]["key"], "log.level");
  EXPECT_EQ(log["changes"][0]["after"], "info,session=debug");
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"set", "limits"},
                                                {"set", "limits", "max_sessions"},
                                                {"set", "log", "=debug"},
                                                {"set", "limits", "max_sessions=1", "max_sessions=2"},
                                                {"set", "limits", "max_sessions=1", "max_grups=2"},
                                                {"set", "log", "format=json"},
                                                {"set", "log", "level=debug", "level=unset"}}) {
    EXPECT_EQ(epctl(wrong).exit_code, 2) << wrong.back();
  }
  EXPECT_TRUE(epctl({"set", "limits", "max_grups=2"})
                  .complains("\"max_grups\" is no option of limits.*; allowed: max_sessions, max_groups, "));
  ASSERT_TRUE(server_->write("asked\n"));
  for (const char* line : {"set options limits.max_arena_bytes=64GiB limits.max_sessions=8\n",
                           "set options log.level=info,session=debug\n", "done\n"}) {
    EXPECT_TRUE(server_->read_until(line)) << line;
  }
  tell_server("fail 2 limits.max_sessions is \"0\"; allowed: 1..65536");
  const Finished refused = epctl({"set", "limits", "max_sessions=0"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(refused.complains("INVALID_ARGUMENT: limits.max_sessions is \"0\"; allowed: 1..65536"))
      << refused.err;
}

TEST_F(CtlTest, ReloadTellsWhatHasChangedOrWhyNot) {
  start_server();
  const Finished done = epctl({"reload"});
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(done.out, "configuration reloaded, generation 2:\n  limits.max_sessions: 256 -> 8\n");
  EXPECT_EQ(epctl({"--json", "reload"}).json()["changes"][0]["after"], "8");
  tell_server("fail 2 devices.host changed from \"1\" to \"2\"; it is fixed at start");
  const Finished refused = epctl({"reload"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(refused.complains("INVALID_ARGUMENT: devices.host changed")) << refused.err;
  EXPECT_EQ(refused.out, "");
}

TEST_F(CtlTest, HealthIsAnExitStatus) {
  start_server();
  const Finished all = epctl({"health"});
  EXPECT_EQ(all.exit_code, 0) << all.out << all.err;
  for (const char* name : {"daemon ", "control ", "membership ", "device/host:0 "})
    EXPECT_TRUE(all.says(name)) << all.out;
  EXPECT_FALSE(all.says("NOT SERVING")) << all.out;
  EXPECT_EQ(epctl({"health", "device/host:0"}).exit_code, 0);
  const Finished unknown = epctl({"health", "device/host:9"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_TRUE(unknown.complains("NOT_FOUND")) << unknown.err;
  EXPECT_TRUE(unknown.complains("device/NAME")) << unknown.err;

  tell_server("down");  // host:1
  EXPECT_EQ(epctl({"health", "device/host:1"}).exit_code, 4);
  EXPECT_EQ(epctl({"health"}).exit_code, 0) << "one device is not the daemon";
  const Json json = epctl({"--json", "health"}).json();
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["serving"], true);
  for (const Json& part : json["subsystems"])
    EXPECT_EQ(part["serving"], part["name"] != "device/host:1") << part;
  tell_server("draining");
  EXPECT_EQ(epctl({"health"}).exit_code, 4);
  EXPECT_EQ(epctl({"health", "control"}).exit_code, 0) << "the supervisor answers";
  tell_server("fail 8 the loop hangs");
  EXPECT_EQ(epctl({"health", "control"}).exit_code, 4);
  server_.reset();
  EXPECT_EQ(epctl({"health"}).exit_code, 3);
}

// A hole in the middle is told where it is.
TEST_F(CtlTest, EventsThatWereForgottenBetweenOthersAreCountedThere) {
  start_server();
  tell_server("event_of 1000 lonely");  // 4
  for (int i = 0; i < 10; ++i) tell_server("event number " + std::to_string(i));
  const std::vector<Json> lines = json_lines(epctl({"events", "--json"}).out);
  std::uint64_t seen = 0;
  bool lonely = false;
  for (const Json& line : lines) {
    if (line.contains("lost")) {
      seen += line["lost"].get<std::uint64_t>();
      continue;
    }
    EXPECT_EQ(line["sequence"], seen + 1) << line;
    seen = line["sequence"];
    lonely |= line["text"] == "lonely";
  }
  EXPECT_EQ(seen, 14u);
  EXPECT_TRUE(lonely) << "another owner's only event";
}

// "linger_us=abc" was answered with the names of all settings, and no range.
TEST_F(CtlTest, AValueOfAWrongFormWasRefusedWithoutWhatIsAllowed) {
  start_server();
  const std::pair<std::string, std::string> ranges[] = {
      {"linger_us", "0..50000"}, {"priority", "-8..7"}, {"sms", "a number of SMs"}};
  for (const auto& [key, range] : ranges) {
    for (const std::string value : {"abc", "", "1.5", "1e3", "5us", "4294967296", "99999999999999999999"}) {
      const Finished result = epctl({"set", "group", "late", key + "=" + value});
      EXPECT_EQ(result.exit_code, 2) << value;
      EXPECT_TRUE(result.complains(key + " is \"" + value + "\"; allowed: " + range + ", or unset"))
          << result.err;
    }
  }
  for (const char* setting : {"linger_us=-1", "sms=-1"})
    EXPECT_TRUE(epctl({"set", "group", "late", setting}).complains(" is \"-1\"; allowed: ")) << setting;
  EXPECT_TRUE(epctl({"set", "device", "host:0", "sms=4x"})
                  .complains("sms is \"4x\"; allowed: a number of SMs, or unset"));
}

TEST_F(CtlTest, SettingsThatCannotBeAreRefusedWithWhatIsAllowed) {
  start_server();
  for (const char* setting : {"sms", "=4", "priority=1"}) {
    const Finished result = epctl({"set", "device", "host:0", setting});
    EXPECT_EQ(result.exit_code, 2) << setting;
    EXPECT_TRUE(result.complains("is not understood; allowed: sms=NUMBER, or =unset")) << result.err;
  }
  EXPECT_TRUE(epctl({"set", "--help"}).says("priority=N"));
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"set"},
                                                {"set", "device", "host:0"},
                                                {"set", "session", "1", "sms=1"},
                                                {"evict"},
                                                {"evict", "session"},
                                                {"evict", "session", "x"},
                                                {"evict", "session", "-1"},
                                                {"evict", "session", "-18446744073709551615"},
                                                {"evict", "group", "late"},
                                                {"evict", "group", "late", "number", "2"}}) {
    EXPECT_EQ(epctl(wrong).exit_code, 2);
  }
  tell_server("fail 2 sms is 99; allowed: 1..8");
  const Finished refused = epctl({"set", "device", "host:0", "sms=99"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_TRUE(refused.complains("INVALID_ARGUMENT: sms is 99; allowed: 1..8")) << refused.err;
}

// The words that bash offers for a line that ends at the cursor.
std::string bash_offers(const std::string& line) {
  const std::string epctl_path = EPCTL_PATH;
  const std::string program = "source <(" + epctl_path +
                              " completion bash); complete -p epctl >/dev/null || exit 9; COMP_LINE='" +
                              line + "'; COMP_POINT=${#COMP_LINE}; _epctl; printf '%s|' \"${COMPREPLY[@]}\"";
  const Finished result = Process({"/bin/bash", "--norc", "-c", program}).finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.out;
}

TEST_F(CtlTest, BashCompletesCommandsOptionsAndNames) {
  start_server();
  const std::string base = std::string(EPCTL_PATH) + " --socket " + control_ + " ";
  EXPECT_NE(bash_offers(base).find("watch|"), std::string::npos);
  EXPECT_EQ(bash_offers(base + "ev"), "events|evict|");
  EXPECT_EQ(bash_offers(base + "events --f"), "--follow|");
  EXPECT_EQ(bash_offers(base + "set "), "device|group|log|limits|");
  EXPECT_EQ(bash_offers(base + "set device "), "host:0|host:1|");
  EXPECT_EQ(bash_offers(base + "set device host:"), "0|1|") << "readline replaces what follows the colon";
  EXPECT_EQ(bash_offers(base + "set device host:0 "), "sms=|");
  EXPECT_EQ(bash_offers(base + "set group l"), "layer-experts|late|");
  EXPECT_EQ(bash_offers(base + "set group late sms=1 p"), "priority=|");
  EXPECT_EQ(bash_offers(base + "set log "), "level=|");
  EXPECT_EQ(bash_offers(base + "health d"), "daemon|device/host:0|device/host:1|");
  EXPECT_EQ(bash_offers(base + "evict session 1"), "11|12|");
  EXPECT_EQ(bash_offers(base + "op 12:"), "501|");
  EXPECT_EQ(bash_offers(base + "completion "), "bash|zsh|fish|");
  EXPECT_EQ(bash_offers(std::string(EPCTL_PATH) + " --socket /nowhere set device "), "|") << "no daemon";
}

TEST_F(CtlTest, CompletionKnowsEveryCommandThatHelpLists) {
  const std::string offered = Process({EPCTL_PATH, "complete", "--", ""}).finish().out;
  const std::string help = epctl({"--help"}).out;
  std::istringstream lines(help.substr(help.find("Subcommands:")));
  std::string line;
  std::getline(lines, line);
  int commands = 0;
  while (std::getline(lines, line) && line.starts_with("  ")) {
    if (line[2] == ' ') continue;  // a summary that continues
    const std::string name = line.substr(2, line.find(' ', 2) - 2);
    EXPECT_NE(("\n" + offered).find("\n" + name + "\n"), std::string::npos) << name;
    ++commands;
  }
  EXPECT_GE(commands, 16);
  for (const char* shell : {"bash", "zsh", "fish"}) {
    EXPECT_TRUE(epctl({"completion", shell}).says("complete --")) << shell;
  }
  EXPECT_EQ(epctl({"completion", "tcsh"}).exit_code, 2);
}

}  // namespace
}  // namespace epd::ctl
