// Allowed and refused forms of the configuration file and the flags.
#include "config_fixture.h"

#include <sys/stat.h>
#include <unistd.h>
#include <cstring>
#include <utility>
#include <vector>

namespace epd::supervisor {
namespace {

constexpr const char* kCluster =
    "cluster.name = \"c\"\ncluster.node = \"node-a\"\ncluster.insecure = true\n"
    "cluster.listen = \"127.0.0.1:7410\"\ncluster.advertise = \"127.0.0.1:7410\"\n"
    "cluster.coordinator = \"127.0.0.1:7410\"\n";

TEST_F(ConfigFile, WhatCanNotBeReadIsRefusedByNameAndReason) {
  write("devices.host = 1");
  const Config before = load_config(sources_).value();
  const std::string file = sources_.path;
  const auto refused = [&](const std::string& path, const char* why) {
    sources_.path = path;
    for (const Status& status : {load_config(sources_).status(), reload_config(before, sources_).status()}) {
      EXPECT_NE(status.code(), StatusCode::kOk) << path;
      EXPECT_NE(status.message().find(path), std::string::npos) << status.to_string();
      EXPECT_NE(status.message().find(why), std::string::npos) << status.to_string();
    }
  };
  refused(std::filesystem::path(file).parent_path(), "directory");
  const std::string pipe = file + ".pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  refused(pipe, "pipe");
  ::unlink(pipe.c_str());
  refused("/proc/self/mem", "Input/output error");
  refused("/dev/zero", "more than");
  refused(file + "/below", "does not exist");
  refused(std::string(5000, 'x'), "File name too long");
  sources_.path = file;
  write("[limits]\nmax_sessions = 1\n[lim");  // half-written
  refused(file, "line 3");
  sources_.path = "/dev/null";
  EXPECT_TRUE(load_config(sources_).ok()) << "nothing is said there, and that can be read";
}

// Each part took the parser some of its stack, and a reload the daemon.
TEST_F(ConfigFile, KeysOfManyPartsAreRefusedBeforeTheyAreParsed) {
  std::string key = "a";
  for (int i = 0; i < 250'000; ++i) key += ".a";
  for (const std::string& text :
       {key + " = 1", "[" + key + "]", "x = {" + key + " = 1}", "x = [{" + key + " = 1}]"}) {
    write("\n" + text);
    const Status status = load_config(sources_).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("line 2"), std::string::npos) << status.message().substr(0, 300);
    EXPECT_LT(status.message().size(), 400u);
  }
  write(std::string(900'000, 'k') + " = 1");
  const Status status = load_config(sources_).status();
  EXPECT_NE(status.message().find("of 900000 characters"), std::string::npos);
  EXPECT_LT(status.message().size(), 400u);
}

TEST_F(ConfigFile, CommentsAndEscapesMayHoldAnyCharacter) {
  const Result<Config> config = load(
      "# gr\xc3\xb6\xc3\x9f"
      "er\ndaemon.socket = \"/run/\\u00e9#\" # \xd0\x92\n");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config.value().socket, "/run/\xc3\xa9#");
}

TEST_F(ConfigFile, ARefusalNamesTheVariableThatHasChosenThePath) {
  sources_.environment["EPD_SOCKET"] = "/run/kept.sock";
  sources_.environment["EPD_LOG_LEVEL"] = "info";
  const Config config = load("daemon.control_socket = \"/run/control.sock\"").value();
  const Status taken =
      with_origins(config, {StatusCode::kResourceExhausted, "another epd serves /run/kept.sock, info"});
  EXPECT_EQ(taken.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(taken.message(),
            "another epd serves /run/kept.sock, info; daemon.socket comes from the environment (EPD_SOCKET)");
  EXPECT_EQ(with_origins(config, invalid_argument("/run/control.sock")).message(), "/run/control.sock");
  EXPECT_NE(
      refusal("daemon.control_socket = \"/run/kept.sock\"").find("comes from the environment (EPD_SOCKET)"),
      std::string::npos);
}

// In an editor the mark can't be seen.
TEST_F(ConfigFile, AByteOrderMarkIsSkipped) {
  const Result<Config> config = load("\xef\xbb\xbflimits.max_groups = 3\n");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config.value().max_groups, 3u);
}

TEST_F(ConfigFile, AFlagTakesAListAsTheFileDoesOrWithCommas) {
  const std::string uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
  using Names = std::vector<std::string>;
  for (const auto& [flag, list] : {std::pair<std::string, Names>("[0, 1]", {"0", "1"}),
                                   {"0,1", {"0", "1"}},
                                   {"[\"1\", \"" + uuid + "\"]", {"1", uuid}},
                                   {"1, " + uuid, {"1", uuid}}}) {
    sources_.flags["devices.cuda"] = flag;
    const Result<Config> config = load("");
    ASSERT_TRUE(config.ok()) << flag << ": " << config.status().to_string();
    EXPECT_EQ(config.value().cuda_devices.list, list) << flag;
  }
  sources_.flags["devices.cuda"] = "[]";
  EXPECT_TRUE(load("")->cuda_devices.list.empty());
  sources_.flags["cluster.nodes"] = R"(["node-*", "b"])";
  EXPECT_EQ(load(kCluster)->cluster_nodes, Names({"node-*", "b"}));
  sources_.flags["cluster.nodes"] = "node-*,b";
  EXPECT_EQ(load(kCluster)->cluster_nodes, Names({"node-*", "b"}));
  sources_.flags["cluster.nodes"] = "[]";
  EXPECT_EQ(load(kCluster)->cluster_nodes, Names());
}

TEST_F(ConfigFile, AFlagThatIsNoListIsRefusedAsItWasWritten) {
  for (const char* flag : {"[0, 1", "[0.5]", "[[0]]", "[0]\nlimits.max_groups = 3", "[\xc3\xa9]", "[a]"}) {
    sources_.flags["devices.cuda"] = flag;
    EXPECT_NE(refusal("").find("; allowed: \"auto\", \"none\", or a list of "), std::string::npos) << flag;
  }
  EXPECT_NE(refusal("").find("devices.cuda in the flags is \"[a]\""), std::string::npos);
}

TEST_F(ConfigFile, AFloatingPointNumberWasRefusedWithoutItsValue) {
  const std::string refused = refusal("[limits]\nmax_sessions = 1e3\n");
  EXPECT_NE(refused.find("is the floating-point number 1000; allowed: an integer, 1..65536"),
            std::string::npos)
      << refused;
}

// The parser named the line, and neither the option nor the allowed values.
TEST_F(ConfigFile, AValueThatIsNoTomlWasRefusedWithoutItsOption) {
  for (const std::string value :
       {"abc", "5us", "007", "1e400", "99999999999999999999", "-99999999999999999999", ""}) {
    const std::string refused = refusal("[devices]\nsms = 2\n  linger_us = " + value + " # long\nhost = 1\n");
    EXPECT_NE(refused.find(" (line 3): "), std::string::npos) << refused;
    const std::string said = "; devices.linger_us is " + (value.empty() ? "nothing" : value);
    EXPECT_TRUE(refused.ends_with(said + "; allowed: an integer, 0..50000")) << refused;
  }
  EXPECT_TRUE(refusal("log.level = info\n").find("; log.level is info; allowed: a string, trace, ") !=
              std::string::npos);
  for (const char* other : {"[devices]\nsms = 2\nsms = 3\n", "[devices]\nkitchen = sink\n", "devices.sms\n"})
    EXPECT_EQ(refusal(other).find("; allowed: "), std::string::npos) << refusal(other);
}

// The nearest of all keys resembled it in nothing.
TEST_F(ConfigFile, AMistypedSectionWasAnsweredWithAnotherOption) {
  for (const auto& [text, said] : {std::pair("[limts]\nx = 1", "unknown option \"limts.x\" in "),
                                   {"[limts]\nx = 1", "; did you mean section [limits]?"},
                                   {"[limts]\nmax_sessions = 1", "; did you mean \"limits.max_sessions\"?"},
                                   {"[kitchen]\nsink = 1", "; sections: access, "},
                                   {"[log]\ncolour = 1", "; allowed: log.format, log.level"}}) {
    const std::string refused = refusal(std::string(text) + "\n");
    EXPECT_NE(refused.find(said), std::string::npos) << refused;
  }
}

TEST_F(ConfigFile, WhatStandsInPlaceOfASectionIsRefused) {
  for (const auto& [text, said] : {std::pair("limits = 5", "is 5; "),
                                   {"access = \"allow\"", "is \"allow\"; "},
                                   {"log = true", "is true; "},
                                   {"cluster = []", "is a list; "},
                                   {"devices = 0.5", "is the floating-point number 0.5; "},
                                   {"[[limits]]\nmax_groups = 1", "is a list; "}}) {
    const std::string refused = refusal(std::string("\n") + text + "\n");
    const std::string key = text[0] == '[' ? "limits" : std::string(text, std::strchr(text, ' '));
    EXPECT_NE(refused.find(key + " in " + sources_.path + " (line 2) " + said), std::string::npos) << refused;
    EXPECT_NE(refused.find("allowed: a section [" + key + "]"), std::string::npos) << refused;
  }
}

}  // namespace
}  // namespace epd::supervisor
