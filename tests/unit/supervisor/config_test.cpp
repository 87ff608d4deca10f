// The configuration gate.
#include "config_fixture.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <tuple>

namespace epd::supervisor {
namespace {

TEST_F(ConfigFile, WithoutAFileEverythingHasItsDefault) {
  ConfigSources none;
  none.path = directory_ + "/missing.toml";
  const Result<Config> config = load_config(none);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config.value().socket, "/run/epd/epd.sock");
  EXPECT_EQ(config.value().socket_mode, 0660u);
  EXPECT_EQ(config.value().operation_ms, 30'000u);
  EXPECT_EQ(config.value().log_levels().general, LogLevel::kInfo);
  EXPECT_GE(config.value().effective_sms(abi::DeviceKind::kHost), 1u);
  EXPECT_GT(config.value().effective_arena_bytes(), std::uint64_t{1} << 30);
  for (const ConfigEntry& entry : config.value().entries) EXPECT_EQ(entry.origin, "default") << entry.key;
  EXPECT_EQ(config.value().entries.size(), config_options().size());
}

TEST_F(ConfigFile, AGivenFileMustExist) {
  const Result<Config> config = load_config(sources_);
  EXPECT_EQ(config.status().code(), StatusCode::kNotFound);
  EXPECT_NE(config.status().message().find(sources_.path), std::string::npos);
}

TEST_F(ConfigFile, LaterSourcesWin) {
  write("[limits]\nmax_sessions = 7\nmax_groups = 8\n[log]\nlevel = \"debug\"\ndaemon.x = 1\n");
  EXPECT_NE(load_config(sources_).status().message().find("log.daemon.x"), std::string::npos);
  write("limits.max_sessions = 7\nlimits.max_groups = 8\nlog.level = \"debug\"\n");
  sources_.environment["EPD_LOG_LEVEL"] = "error";
  sources_.environment["EPD_SOCKET"] = "/tmp/a";
  sources_.flags["limits.max_sessions"] = "9";
  sources_.flags["daemon.socket"] = "/tmp/b";
  const Result<Config> config = load_config(sources_);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config.value().max_sessions, 9u);
  EXPECT_EQ(config.value().max_groups, 8u);
  EXPECT_EQ(config.value().log_levels().general, LogLevel::kError);
  EXPECT_EQ(config.value().socket, "/tmp/b");
  EXPECT_EQ(origin(config.value(), "limits.max_sessions"), "flag");
  EXPECT_EQ(origin(config.value(), "limits.max_groups"), "file");
  EXPECT_EQ(origin(config.value(), "log.level"), "environment");
  EXPECT_EQ(origin(config.value(), "timeouts.join_ms"), "default");
}

TEST_F(ConfigFile, UnknownKeysAreRefusedWithTheNearest) {
  const std::string text = refusal("[limits]\nmax_sesions = 3\n");
  EXPECT_NE(text.find("limits.max_sesions"), std::string::npos) << text;
  EXPECT_NE(text.find("\"limits.max_sessions\"?"), std::string::npos) << text;
  EXPECT_NE(text.find("line 2"), std::string::npos) << text;
  write("");
  sources_.flags["devices.hosts"] = "2";
  EXPECT_NE(load_config(sources_).status().message().find("\"devices.host\"?"), std::string::npos);
}

TEST_F(ConfigFile, BadValuesAreRefusedWithWhatIsAllowed) {
  struct Case {
    const char* text;
    std::vector<const char*> words;
  };
  const Case cases[] = {
      {"devices.host = 0\ndevices.cuda = \"none\"", {"devices.host", "devices.cuda", "at least one device"}},
      {"devices.cuda = 2", {"devices.cuda", "line 1", "\"auto\", \"none\"", "[0, 1]"}},
      {"devices.cuda = [3, 0, 3]", {"devices.cuda", "3,0,3", "different"}},
      {"devices.cuda = [\"0\", \"00\"]", {"devices.cuda", "0,00", "different"}},
      {"devices.cuda = [0, 1.5]", {"devices.cuda", "0,?", "\"auto\", \"none\""}},
      {"devices.cuda = \"all\"", {"devices.cuda", "\"all\"", "\"auto\", \"none\""}},
      {"devices.host = -1", {"devices.host", "\"-1\"", "0..64"}},
      {"devices.host = \"two\"", {"devices.host", "\"two\"", "\"auto\", 0..64"}},
      {"devices.host = 2.5", {"devices.host", "the floating-point number 2.5", "\"auto\", 0..64", "line 1"}},
      {"limits.max_groups = 2.5", {"limits.max_groups", "integer"}},
      {"log.level = \"loud\"", {"log.level", "loud", "trace, debug, info, warning, error"}},
      {"log.level = \"info,kitchen=debug\"", {"log.level", "kitchen", "info,session=debug", "supervisor"}},
      {"log.format = 3", {"log.format", "string"}},
      {"metrics.listen = \"localhost:9456\"", {"metrics.listen", "localhost:9456", "127.0.0.1:9455"}},
      {"metrics.listen = \"99999\"", {"metrics.listen", "99999", "0..65535"}},
      {"metrics.listen = 9456", {"metrics.listen", "string"}},
      {"daemon.socket_mode = \"0999\"", {"daemon.socket_mode", "0999", "octal"}},
      {"daemon.socket_mode = \"7777\"", {"daemon.socket_mode", "7777"}},
      {"limits.max_arena_bytes = \"12 parsecs\"", {"limits.max_arena_bytes", "12 parsecs", "MiB"}},
      {"limits.max_arena_bytes = \"99999999999TiB\"", {"limits.max_arena_bytes"}},
      {"engine.restart_backoff_min_ms = 6000", {"restart_backoff_min_ms", "6000", "5000"}},
      {"daemon.socket = \"/run/epd/control.sock\"", {"daemon.control_socket", "two paths"}},
      {"daemon.socket = \"/run/../run/epd//control.sock\"", {"/run/../run/epd//control.sock", "two paths"}},
      {"limits = 3", {"limits"}},
      {"log.level = ", {"line 1"}},
      {"daemon.socket = \"/run/a:/run/b\"", {"daemon.socket", "/run/a:/run/b", "without colons"}},
      {"daemon.socket = \"/run/a\\u0000b\"", {"daemon.socket", "line 1", "control characters"}},
      {"\ndaemon.socket = \"/run/\xc3\xa9\"", {"line 2", "not ASCII", "\\u00e9"}},
      {"access.\xd0\x92 = 1", {"line 1", "not ASCII"}},  // undefined behaviour in toml++ 3.3
  };
  for (const Case& c : cases) {
    const std::string text = refusal(c.text);
    for (const char* word : c.words)
      EXPECT_NE(text.find(word), std::string::npos) << c.text << " -> " << text;
  }
}

constexpr const char* kRules = R"(
access.default = "deny"
[[access.rule]]
users = ["root", 1001]
groups = ["prod-*", "eval"]
devices = ["host:[01]"]
max_sessions = 8
max_groups = 4
max_arena_bytes = "10GiB"
[[access.rule]]
users = [1001, 1002]
attach = false
[[access.rule]]
unix_groups = ["root", 77]
)";

TEST_F(ConfigFile, DevicesAreNamedByListsAndByAuto) {
  const Config automatic = load("").value();
  EXPECT_TRUE(automatic.cuda_devices.automatic);
  EXPECT_EQ(automatic.host_devices, kAutomatic);
  const Config none = load("devices.cuda = []\ndevices.host = 3").value();
  EXPECT_TRUE(!none.cuda_devices.automatic && none.cuda_devices.list.empty());
  EXPECT_EQ(none.host_devices, 3u);
  const std::string uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
  const Config listed = load("devices.cuda = [2, \"" + uuid + "\"]").value();
  EXPECT_EQ(listed.cuda_devices.list, (std::vector<std::string>{"2", uuid}));
  write("");
  sources_.flags["devices.cuda"] = "0,1";
  EXPECT_EQ(load_config(sources_).value().cuda_devices.list, (std::vector<std::string>{"0", "1"}));
}

TEST_F(ConfigFile, TheFirstRuleAboutAUserDecides) {
  const Result<Config> config = load(kRules);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  const AccessPolicy& access = config.value().access;
  ASSERT_EQ(access.rules().size(), 3u);
  const std::vector<std::uint32_t> none = {500}, ml = {500, 77};
  EXPECT_TRUE(access.may_attach({0, none}).ok());
  EXPECT_TRUE(access.may_attach({1001, none}).ok()) << "rule 1 is first";
  EXPECT_EQ(access.may_attach({1002, ml}).to_string(),
            "PERMISSION_DENIED: user 1002 may not attach: access.rule 2 says attach = false");
  EXPECT_TRUE(access.may_attach({1003, ml}).ok()) << "a supplementary group";
  EXPECT_EQ(access.may_attach({1003, none}).to_string(),
            "PERMISSION_DENIED: user 1003 may not attach: no access.rule is about it and access.default is "
            "\"deny\"");
  EXPECT_TRUE(access.may_join({0, none}, "prod-7").ok());
  EXPECT_TRUE(access.may_join({0, none}, "eval").ok());
  EXPECT_EQ(access.may_join({0, none}, "evals").to_string(),
            "PERMISSION_DENIED: user 0 (root) may not join group \"evals\": access.rule 1 allows \"prod-*\", "
            "\"eval\"");
  EXPECT_TRUE(access.may_join({1003, ml}, "anything").ok());
  EXPECT_EQ(access.may_join({1003, none}, "x").code(), StatusCode::kPermissionDenied);
  EXPECT_TRUE(access.may_use_device({1001, none}, "host:1").ok());
  EXPECT_EQ(access.may_use_device({1001, none}, "host:2").to_string(),
            "PERMISSION_DENIED: user 1001 may not use device \"host:2\": access.rule 1 allows \"host:[01]\"");
}

TEST_F(ConfigFile, ARulesQuotasGoBeforeTheGeneralOnes) {
  const Config config = load(kRules).value();
  const std::vector<std::uint32_t> ml = {77};
  EXPECT_EQ(config.max_sessions_of({1001, ml}).limit, 8u);
  EXPECT_EQ(config.max_sessions_of({1001, ml}).source, "access.rule 1");
  EXPECT_EQ(config.max_groups_of({1001, ml}).limit, 4u);
  EXPECT_EQ(config.max_arena_bytes_of({1001, ml}).limit, std::uint64_t{10} << 30);
}

// A coordinator, which does not know the user's groups, took the limit down to that of a user without any.
TEST_F(ConfigFile, MostGroupsOfAUserOfAnotherNodeCountRulesAboutUnixGroups) {
  const Config config = load(R"(
limits.max_groups_per_user = 2
[[access.rule]]
users = [1001]
max_groups = 1
[[access.rule]]
unix_groups = [77]
max_groups = 16
[[access.rule]]
users = [1002]
max_groups = 3
[[access.rule]]
unix_groups = [78]
max_groups = 64
)")
                            .value();
  EXPECT_EQ(config.most_groups_of(1001).limit, 1u) << "rule 1 is first";
  EXPECT_EQ(config.most_groups_of(1002).limit, 16u);
  EXPECT_EQ(config.most_groups_of(1002).source, "access.rule 2");
  EXPECT_EQ(config.most_groups_of(1003).limit, 64u);
  EXPECT_EQ(load("limits.max_groups_per_user = 2").value().most_groups_of(1003).limit, 2u);
}

constexpr std::uint32_t kNobody = 65534;

TEST_F(ConfigFile, ByDefaultOneUserLeavesAQuarterToOthers) {
  const Config config = load("limits.max_sessions = 10\nlimits.max_groups = 1").value();
  const Caller user{kNobody, {}};
  EXPECT_EQ(config.max_sessions_of(user).limit, 7u);
  EXPECT_EQ(config.max_sessions_of(user).source,
            "limits.max_sessions_per_user: 3/4 of limits.max_sessions unless the operator sets it");
  EXPECT_EQ(config.max_groups_of(user).limit, 1u) << "never none";
  const std::uint64_t arenas = config.effective_arena_bytes();
  EXPECT_EQ(config.max_arena_bytes_of(user).limit, arenas - arenas / 4);
  const std::uint64_t routings = config.effective_routing_bytes();
  EXPECT_EQ(config.max_routing_bytes_of(user).limit, routings - (routings + 3) / 4);
  for (const std::uint32_t uid : {std::uint32_t{0}, static_cast<std::uint32_t>(::geteuid())}) {
    const Caller owner{uid, {}};
    EXPECT_EQ(config.max_sessions_of(owner).limit, 10u);
    EXPECT_EQ(config.max_groups_of(owner).limit, 1u);
    EXPECT_EQ(config.max_arena_bytes_of(owner).limit, arenas);
    EXPECT_EQ(config.max_routing_bytes_of(owner).limit, routings);
  }
}

TEST_F(ConfigFile, LimitsForOneUserThatAreSetHoldForEverybody) {
  const Config config = load(R"(
limits.max_sessions_per_user = 256
limits.max_groups_per_user = 2
limits.max_arena_bytes_per_user = "1GiB"
limits.max_routing_bytes_per_user = "1MiB"
)")
                            .value();
  for (const std::uint32_t uid : {std::uint32_t{0}, kNobody}) {
    const Caller caller{uid, {}};
    EXPECT_EQ(config.max_sessions_of(caller).limit, 256u);
    EXPECT_EQ(config.max_groups_of(caller).limit, 2u);
    EXPECT_EQ(config.max_groups_of(caller).source, "limits.max_groups_per_user");
    EXPECT_EQ(config.max_arena_bytes_of(caller).limit, std::uint64_t{1} << 30);
    EXPECT_EQ(config.max_routing_bytes_of(caller).limit, std::uint64_t{1} << 20);
  }
}

TEST_F(ConfigFile, BadRulesAreRefusedWithTheValueAndThePlace) {
  struct Case {
    const char* text;  // after "[[access.rule]]" in line 1
    std::vector<const char*> words;
  };
  const Case cases[] = {
      {"users = [\"no-such-user\"]", {"rule 1", "line 2", "users", "\"no-such-user\"", "4294967294"}},
      {"unix_groups = [\"no-such-group\"]", {"unix_groups", "\"no-such-group\"", "name of a group"}},
      {"users = [-1]", {"users", "-1"}},
      {"users = []", {"users is []", "at least one"}},
      {"groups = [\"[a\"]", {"groups", "\"[a\"", "[abc]"}},
      {"groups = [\"[]\"]", {"groups", "\"[]\"", "[abc]"}},
      {"users = [4294967295]", {"users", "4294967295"}},
      {"users = [\"root\\u0000\"]", {"users", "name of a user"}},
      {"groups = [\"a\\u0000\"]", {"groups"}},
      {"users = \"root\"", {"users", "\"root\"", "an array"}},
      {"users = [[0]]", {"users", "an array"}},
      {"attach = 1", {"attach", "is 1", "true, false"}},
      {"groups = [\"\"]", {"groups", "\"\""}},
      {"groups = [3]", {"groups", "is 3"}},
      {"max_sessions = 0", {"max_sessions", "is 0", "1..65536"}},
      {"operate = \"all\"", {"line 2", "operate", "\"all\"", "\"none\", \"read\", \"change\""}},
      {"operate = true", {"operate", "true"}},
      {"max_priority = 8", {"max_priority", "is 8", "-8..7"}},
      {"max_priority = \"0\"", {"max_priority", "\"0\""}},
      {"max_groups = \"4\"", {"max_groups", "\"4\""}},
      {"max_arena_bytes = \"10 bytes\"", {"max_arena_bytes", "\"10 bytes\"", "GiB"}},
      {"max_arena_bytes = 1125899906842625", {"max_arena_bytes", "1125899906842625"}},
      {"sessions = 3", {"line 2", "unknown key \"sessions\"", "max_sessions"}},
  };
  for (const Case& c : cases) {
    const std::string text = refusal(std::string("[[access.rule]]\n") + c.text);
    for (const char* word : c.words)
      EXPECT_NE(text.find(word), std::string::npos) << c.text << " -> " << text;
  }
  EXPECT_NE(refusal("access.rule = 7").find("[[access.rule]]"), std::string::npos);
  EXPECT_NE(refusal("access.rule = [7]").find("a table"), std::string::npos);
  EXPECT_NE(refusal("access.default = \"maybe\"").find("allow, deny"), std::string::npos);
}

// A directory ended the process, at the start and at each reload.
TEST_F(ConfigFile, GroupsOfBothSocketsAreNamesOrNumbers) {
  write("daemon.socket_group = \"root\"\ndaemon.control_socket_group = \"61234\"");
  const Result<Config> config = load_config(sources_);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config.value().socket_gid, 0u);
  EXPECT_EQ(config.value().control_socket_gid, 61234u);
  EXPECT_EQ(config.value().control_socket_mode, 0600u) << "closed, unless somebody opens it";
  for (const char* key : {"daemon.socket_group", "daemon.control_socket_group"}) {
    for (const char* value : {"no-such-group", "4294967295", "-1", "12x"}) {
      const std::string text = refusal(std::string(key) + " = \"" + value + "\"");
      EXPECT_NE(text.find(std::string(key) + " is \"" + value + "\""), std::string::npos) << text;
      EXPECT_NE(text.find("0..4294967294"), std::string::npos) << text;
    }
  }
  for (const char* key : {"daemon.socket", "daemon.control_socket"}) {
    const std::string text = refusal(std::string(key) + " = \"/" + std::string(107, 'a') + "\"");
    EXPECT_NE(text.find(key), std::string::npos) << text;
    EXPECT_NE(text.find("108 characters; allowed: 1..107"), std::string::npos) << text;
  }
}

TEST_F(ConfigFile, WhoMayOperateAndWithWhichPriorityOneJoins) {
  write(R"(
limits.max_priority = 3
[[access.rule]]
users = ["61001"]
operate = "change"
[[access.rule]]
unix_groups = [62001]
operate = "none"
max_priority = -2
[[access.rule]]
users = [61003]
)");
  const Result<Config> config = load_config(sources_);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  const AccessPolicy& access = config.value().access;
  const std::vector<std::uint32_t> none;
  const std::vector<std::uint32_t> team = {62001};
  EXPECT_TRUE(access.may_operate({61001, team}, Right::kChange, "drain").ok()) << "the first rule decides";
  EXPECT_EQ(
      access.may_operate({61002, team}, Right::kRead, "list groups").to_string(),
      "PERMISSION_DENIED: user 61002 may not list groups: access.rule 2 says operate = \"none\"; needed: "
      "\"read\"");
  for (const std::uint32_t user : {61003u, 61004u}) {
    EXPECT_TRUE(access.may_operate({user, none}, Right::kRead, "list groups").ok());
    EXPECT_EQ(access.may_operate({user, none}, Right::kChange, "drain").to_string(),
              "PERMISSION_DENIED: user " + std::to_string(user) +
                  " may not drain: no access.rule gives it more, and access.operate is \"read\"; needed: "
                  "\"change\"");
  }
  EXPECT_TRUE(access.may_take_priority({61001, none}, 3).ok());
  EXPECT_EQ(access.may_take_priority({61001, none}, 4).to_string(),
            "PERMISSION_DENIED: user 61001 may not join with priority 4: limits.max_priority is 3");
  EXPECT_TRUE(access.may_take_priority({61002, team}, -2).ok());
  EXPECT_EQ(
      access.may_take_priority({61002, team}, 0).to_string(),
      "PERMISSION_DENIED: user 61002 may not join with priority 0: access.rule 2 says max_priority = -2");
  EXPECT_NE(refusal("access.operate = \"write\"").find("none, read, change"), std::string::npos);
  EXPECT_NE(refusal("limits.max_priority = 8").find("-8..7"), std::string::npos);
}

TEST_F(ConfigFile, RulesAreShownAndMayChange) {
  const Config before = load(kRules).value();
  EXPECT_EQ(before.entries.size(), config_options().size() + 3);
  EXPECT_EQ(before.entries.back().key, "access.rule 3");
  EXPECT_EQ(before.entries.back().value, "unix_groups=\"root\",77");
  EXPECT_EQ(before.entries.back().origin, "file");
  write("[[access.rule]]\nattach = false");
  const Result<Config> after = reload_config(before, sources_);
  ASSERT_TRUE(after.ok()) << after.status().to_string();
  EXPECT_EQ(after.value().access.rules().size(), 1u);
  EXPECT_FALSE(after.value().access.may_attach({1, {}}).ok()) << "a rule without users is about everybody";
}

TEST_F(ConfigFile, BytesHaveUnits) {
  EXPECT_EQ(load("limits.max_arena_bytes = \"3GiB\"").value().max_arena_bytes, std::uint64_t{3} << 30);
  EXPECT_EQ(load("limits.max_arena_bytes = 12345").value().max_arena_bytes, 12345u);
  const Config config = load("limits.max_arena_bytes = \"2MiB\"").value();
  EXPECT_EQ(config.effective_arena_bytes(), 2u << 20);
}

TEST_F(ConfigFile, AReloadAppliesWhatMayChange) {
  const Config before = load("limits.max_sessions = 3").value();
  write("limits.max_sessions = 4\nlog.level = \"debug\"");
  const Result<Config> after = reload_config(before, sources_);
  ASSERT_TRUE(after.ok()) << after.status().to_string();
  EXPECT_EQ(after.value().max_sessions, 4u);
  EXPECT_EQ(after.value().log_levels().general, LogLevel::kDebug);
}

TEST_F(ConfigFile, AReloadRefusesWhatIsFixedByName) {
  const Config before = load("devices.host = 2").value();
  write("devices.host = 3\nlimits.max_sessions = 4");
  const Result<Config> after = reload_config(before, sources_);
  ASSERT_FALSE(after.ok());
  for (const char* word : {"devices.host", "\"2\"", "\"3\"", "nothing was applied"})
    EXPECT_NE(after.status().message().find(word), std::string::npos) << after.status().message();
  for (const OptionInfo& option : config_options()) {
    const bool fixed = option.key.starts_with("daemon.") || option.key.starts_with("mps.") ||
                       option.key.starts_with("cluster.") || option.key.starts_with("network.") ||
                       option.key.starts_with("metrics.") || option.key == "log.format" ||
                       option.key == "devices.host" || option.key == "devices.cuda" ||
                       option.key == "devices.mode";
    EXPECT_EQ(option.reloadable, !fixed) << option.key;
  }
}

TEST_F(ConfigFile, MetricsAreServedAtAnAddressAndAPort) {
  for (const char* allowed : {"", "9455", "127.0.0.1:9455", "0.0.0.0:0", "[::1]:65535"})
    EXPECT_TRUE(load(std::string("metrics.listen = \"") + allowed + "\"").ok()) << allowed;
  for (const char* refused :
       {"94555", ":9455", "localhost:9455", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:9455s",
        "127.0.0.1:1,127.0.0.1:2", "::1:9455", "[127.0.0.1]:1", " "}) {
    const Result<Config> config = load(std::string("metrics.listen = \"") + refused + "\"");
    ASSERT_FALSE(config.ok()) << refused;
    EXPECT_NE(config.status().message().find(std::string("metrics.listen is \"") + refused + "\"; allowed: "),
              std::string::npos)
        << config.status().to_string();
  }
}

TEST_F(ConfigFile, TheShippedFileSaysTheDefaults) {
  ConfigSources shipped;
  shipped.path = EPD_SHIPPED_CONFIG;
  shipped.path_given = true;
  const Result<Config> config = load_config(shipped);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  const std::vector<OptionInfo> options = config_options();
  for (std::size_t i = 0; i < options.size(); ++i) {
    const ConfigEntry& entry = config.value().entries[i];
    EXPECT_EQ(entry.value, options[i].default_text) << entry.key;
    EXPECT_EQ(entry.origin, "file") << entry.key << " is not documented there";
  }
}

TEST_F(ConfigFile, EveryOptionIsDocumented) {
  for (const OptionInfo& option : config_options()) {
    EXPECT_GT(option.help.size(), 10u) << option.key;
    EXPECT_FALSE(option.allowed.empty()) << option.key;
  }
}

// The output of check-config.
TEST_F(ConfigFile, WhatIsPrintedCanBeReadBack) {
  const Result<Config> config = load(
      "devices.host = 2\ndevices.cuda = [0, "
      "\"GPU-01234567-89ab-cdef-0123-456789abcdef\"]\nlimits.max_arena_bytes = "
      "\"64MiB\"\nlimits.max_priority = -2\n"
      "log.level = \"info,session=debug\"\nmetrics.listen = \"\"\ndaemon.socket = \"/run/\\u00e9\"\n");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  const std::string text = to_toml(config.value());
  EXPECT_NE(text.find("\ndevices.host = 2 "), std::string::npos) << text;
  EXPECT_NE(text.find("\ndevices.cuda = [\"0\", \"GPU-01234567-89ab-cdef-0123-456789abcdef\"] "),
            std::string::npos)
      << text;
  const Result<Config> again = load(text);
  ASSERT_TRUE(again.ok()) << again.status().to_string() << "\n" << text;
  for (std::size_t i = 0; i < config_options().size(); ++i)
    EXPECT_EQ(again.value().entries[i].value, config.value().entries[i].value)
        << again.value().entries[i].key;
}

TEST_F(ConfigFile, RulesWereLostInWhatIsPrinted) {
  for (const char* rules :
       {"[[access.rule]]\nusers = [1, \"root\"]\nattach = false\n[[access.rule]]\ngroups = "
        "[\"a\\\\*\", 'b\"', \"\\u00e9\"]\noperate = \"change\"\nmax_arena_bytes = \"1GiB\"\n",
        "access.rule = [{users = [7], max_sessions = 0x10, max_priority = -2}]\n"}) {
    Result<Config> config = load(rules);
    ASSERT_TRUE(config.ok()) << config.status().to_string();
    const std::string text = to_toml(*config);
    Result<Config> again = load(text);
    ASSERT_TRUE(again.ok()) << again.status().to_string() << "\n" << text;
    EXPECT_TRUE(changes_between(*config, *again).empty()) << text;
    EXPECT_EQ(again->access.rules().size(), config->access.rules().size()) << text;
  }
}

TEST_F(ConfigFile, OnlyTheFirstErrorOfAFileWasTold) {
  const std::string text = refusal(
      "kitchen.sink = 1\nlog.level = 3\nlimits.max_groups = 0\ncluster = 5\nlog.format = \"xml\"\n"
      "[[access.rule]]\nusers = [\"no-such-user\"]\ncolour = 1\n");
  std::size_t at = 0;
  for (const char* part :
       {"\"kitchen.sink\" in ", "(line 1)", "log.level in ", "(line 2)", "limits.max_groups in ",
        "(line 3) is \"0\"", "cluster in ", "(line 4)", "log.format in ", "(line 5) is \"xml\"",
        "(line 7): users", "(line 8)", "\"colour\""}) {
    const std::size_t found = text.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << " is not in its place in " << text;
    at = found;
  }
}

// Each unknown name is compared with all that are known, and a reload is a step of the daemon's loop.
TEST_F(ConfigFile, OfVeryManyErrorsSomeAreTold) {
  std::string file;
  for (int i = 0; i < 40'000; ++i) file += "kitchen.sink" + std::to_string(i) + " = 1\n";
  const std::string text = refusal(file);
  EXPECT_LT(text.size(), 10'000u);
  EXPECT_TRUE(text.ends_with("; and more")) << text;
}

TEST_F(ConfigFile, MetricsAndTheClusterListenedAtOnePort) {
  const std::string cluster =
      "cluster.name = \"c\"\ncluster.node = \"a\"\ncluster.insecure = true\ncluster.listen = "
      "\"127.0.0.1:7410\"\n"
      "cluster.advertise = \"127.0.0.1:7410\"\ncluster.coordinator = \"127.0.0.1:7410\"\nmetrics.listen = ";
  for (const char* listen : {"127.0.0.1:7410", "0.0.0.0:7410", "[::]:7410", "7410"}) {
    const std::string text = refusal(cluster + "\"" + listen + "\"\n");
    EXPECT_NE(text.find("and cluster.listen is \"127.0.0.1:7410\"; allowed: two ports, or two addresses"),
              std::string::npos)
        << text;
  }
  for (const char* listen : {"127.0.0.1:7411", "127.0.0.2:7410", "127.0.0.1:0", ""})
    EXPECT_TRUE(load(cluster + "\"" + listen + "\"\n").ok()) << listen;
}

TEST_F(ConfigFile, LingeringWithoutAGpuWasAcceptedWithoutAWord) {
  for (const auto& [text, warnings] : {std::pair("devices.cuda = \"none\"\ndevices.linger_us = 7", 1u),
                                       {"devices.cuda = \"none\"", 0u},
                                       {"devices.cuda = [0]\ndevices.linger_us = 7", 0u},
                                       {"devices.linger_us = 7", 0u}}) {
    const std::vector<std::string> told = warnings_of(load(text).value(), {});
    ASSERT_EQ(told.size(), warnings) << text;
    for (const std::string& warning : told)
      EXPECT_NE(warning.find("devices.linger_us is 7 and devices.cuda is \"none\""), std::string::npos)
          << warning;
  }
}

TEST_F(ConfigFile, APrivateKeyThatEverybodyMayReadIsAWarning) {
  const std::string key = directory_ + "/key.pem";
  for (const char* name : {"ca", "cert", "key"}) std::ofstream(directory_ + "/" + name + ".pem") << "x";
  Config config;
  config.cluster.emplace();
  config.cluster_tls_key = key;
  for (const auto& [mode, warnings] : {std::pair(0644, 1u), {0604, 1u}, {0640, 0u}, {0600, 0u}}) {
    ASSERT_EQ(::chmod(key.c_str(), static_cast<mode_t>(mode)), 0);
    const std::vector<std::string> told = warnings_of(config, {});
    ASSERT_EQ(told.size(), warnings) << mode;
    for (const std::string& warning : told) EXPECT_NE(warning.find(key), std::string::npos) << warning;
  }
}

// "allowed: 1..65536 in epd.toml": as if the file were a part of what is allowed.
TEST_F(ConfigFile, ThePlaceOfAWrongValueStoodBehindWhatIsAllowed) {
  sources_.environment["EPD_LOG_LEVEL"] = "loud";
  sources_.flags["devices.host"] = "99";
  const std::string text = refusal("[limits]\nmax_groups = 0\nmax_sessions = 0\n");
  for (const std::string& part :
       {"limits.max_groups in " + sources_.path + " (line 2) is \"0\"; allowed: 1..65536; ",
        "limits.max_sessions in " + sources_.path + " (line 3) is \"0\"; allowed: 1..65536; ",
        std::string("log.level in the environment (EPD_LOG_LEVEL) is \"loud\"; allowed: trace, "),
        std::string("devices.host in the flags is \"99\"; allowed: \"auto\", 0..64")}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in " << text;
  }
}

// Only unread variables with at most two wrong letters were told.
TEST(Environments, UnknownVariablesWereIgnoredWithoutAWord) {
  const std::pair<const char*, const char*> told[] = {
      {"EPD_DAEMON_SOCKET", "EPD_SOCKET"},
      {"EPD_DEVICES_HOST", "the configuration file, or --devices.host"},
      {"EPD_DEVICES_LINGER", "the configuration file, or --devices.linger_us"},
      {"EPD_DEVICES_SM", "the configuration file, or --devices.sms"},
      {"EPD_KITCHEN", "EPD_CONFIG, EPD_CONTROL_SOCKET, EPD_LOG_LEVEL, EPD_SOCKET"},
      {"EPD_LIMITS_MAX_SESSION", "the configuration file, or --limits.max_sessions"},
      {"EPD_SOCKETS", "EPD_SOCKET"}};
  const char* const others[] = {"EPD_LOG_LEVEL",     "EPD_CONFIG",    "EPD_LOG",         "EPD_LIBRARY",
                                "EPD_SERVICE_HOST",  "EPD_WAIT_BY",   "EPD_DEEPEP_NAME", "EPD_TEST_SEED",
                                "EPD_PORT_7410_TCP", "EPD_GPU_STEPS", "EPD_METRICS_PORT"};
  for (const auto& [name, instead] : told) ::setenv(name, "9", 1);
  for (const char* name : others) ::setenv(name, "info", 1);
  const Environment environment = read_environment();
  for (const auto& [name, instead] : told) ::unsetenv(name);
  for (const char* name : others) ::unsetenv(name);
  auto ignored = environment.ignored;
  std::sort(ignored.begin(), ignored.end());
  ASSERT_EQ(ignored.size(), std::size(told));
  for (std::size_t i = 0; i < ignored.size(); ++i) {
    EXPECT_EQ(ignored[i].first, told[i].first);
    EXPECT_EQ(ignored[i].second, told[i].second);
    EXPECT_NE(warnings_of({}, environment).at(i).find(" is not read; allowed: "), std::string::npos);
  }
}

TEST(Environments, TheJournalIsKnownByItsDescriptor) {
  struct stat info {};
  ASSERT_EQ(::fstat(STDERR_FILENO, &info), 0);
  ::setenv("JOURNAL_STREAM", (std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino)).c_str(), 1);
  EXPECT_TRUE(read_environment().journal);
  ::setenv("JOURNAL_STREAM", "1:1", 1);
  EXPECT_FALSE(read_environment().journal) << "standard error has been redirected since";
  ::unsetenv("JOURNAL_STREAM");
  EXPECT_FALSE(read_environment().journal);
}

TEST_F(ConfigFile, APortAloneIsOneOfTheLoopbackAddress) {
  EXPECT_EQ(load("metrics.listen = \"9455\"\n").value().metrics_listen, "127.0.0.1:9455");
  EXPECT_EQ(load("metrics.listen = \"[::1]:0\"\n").value().metrics_listen, "[::1]:0");
  EXPECT_EQ(load("").value().metrics_listen, "") << "off unless somebody asks for it";
}

TEST_F(ConfigFile, RoomsMayLogMore) {
  const Result<Config> config = load("log.level = \"warning,session=debug\"\n");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(to_text(config.value().log_levels()), "warning,session=debug");
}

TEST_F(ConfigFile, AnOperatorSetsLimitsAndTheLogAndNothingElse) {
  const Result<Config> config =
      load("limits.max_sessions = 7\n[[access.rule]]\nusers = [1]\nattach = false\n");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  const Result<Config> changed = with_options(
      config.value(), {{"limits.max_sessions", "9"}, {"log.level", "debug"}, {"limits.max_priority", "-3"}});
  ASSERT_TRUE(changed.ok()) << changed.status().to_string();
  EXPECT_EQ(changed.value().max_sessions, 9u);
  EXPECT_EQ(origin(changed.value(), "limits.max_sessions"), "operator");
  EXPECT_EQ(origin(changed.value(), "limits.max_groups"), "default");
  const std::vector<std::uint32_t> nobody;
  EXPECT_FALSE(changed.value().access.may_take_priority({2, nobody}, -2).ok())
      << "the policy has the new limit";
  EXPECT_FALSE(changed.value().access.may_attach({1, nobody}).ok()) << "and its rules";
  const auto changes = changes_between(config.value(), changed.value());
  ASSERT_EQ(changes.size(), 3u);
  EXPECT_EQ(changes[1].key, "limits.max_sessions");
  EXPECT_EQ(changes[1].before, "7");
  EXPECT_EQ(changes[1].after, "9");
  EXPECT_EQ(config.value().max_sessions, 7u);

  for (const auto& [key, value, says] :
       {std::tuple("limits.max_sessions", "0", "limits.max_sessions is \"0\"; allowed: 1..65536"),
        {"limits.max_session", "1", "did you mean \"limits.max_sessions\"?"},
        {"devices.sms", "1", "devices.sms can't be set while the daemon runs; allowed: log.level, limits.*"},
        {"log.level", "loud", "log.level is \"loud\"; allowed: trace, debug"}}) {
    const Result<Config> refused = with_options(config.value(), {{"limits.max_groups", "3"}, {key, value}});
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << key;
    EXPECT_NE(refused.status().message().find(says), std::string::npos) << refused.status().message();
  }
}

TEST_F(ConfigFile, RulesThatComeAndGoAreChanges) {
  const Result<Config> without = load("");
  const Result<Config> with = load("[[access.rule]]\nusers = [1]\nattach = false\n");
  ASSERT_TRUE(without.ok() && with.ok());
  const auto came = changes_between(without.value(), with.value());
  ASSERT_EQ(came.size(), 1u);
  EXPECT_EQ(came[0].key, "access.rule 1");
  EXPECT_EQ(came[0].before, "");
  EXPECT_NE(came[0].after, "");
  EXPECT_EQ(changes_between(with.value(), without.value()).at(0).after, "");
}

}  // namespace
}  // namespace epd::supervisor
