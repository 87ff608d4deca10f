// epctl's standard output: a document whatever happens, and never half an answer in silence.
#include "ctl_fixture.h"

namespace epd::ctl {
namespace {

TEST_F(CtlTest, UsageErrorsUnderJsonAreDocuments) {
  start_server();
  const std::vector<std::vector<std::string>> wrong{{"--json"},
                                                    {"--json", "frobnicate"},
                                                    {"frobnicate", "--json"},
                                                    {"--json", "status", "extra"},
                                                    {"--json", "--timeout-ms", "soon", "status"},
                                                    {"--json", "--timeout-ms"},
                                                    {"--json=true", "frobnicate"},
                                                    {"--json=1", "frobnicate"},
                                                    {"--json=yes", "--timeout-ms"},
                                                    {"--json=maybe", "status"},
                                                    {"set", "device", "host:0", "--json"},
                                                    {"--json", "evict", "session", "-1"},
                                                    {"--json", "completion", "tcsh"},
                                                    {"--json", "set", "device", "host:0", "sms=x"},
                                                    {"--json", "set", "device", "host:0", "sms=1", "sms=2"}};
  for (const auto& arguments : wrong) {
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
    const Json document = result.json();
    ASSERT_FALSE(document.is_discarded()) << arguments.back() << ": " << result.out << result.err;
    EXPECT_EQ(document["error"]["class"], "usage");
    EXPECT_EQ(document["error"]["status"], "INVALID_ARGUMENT");
    EXPECT_FALSE(document["error"]["message"].get<std::string>().empty());
  }
}

TEST_F(CtlTest, AnUnknownWordIsNamedWithWhatIsAllowed) {
  struct Case {
    std::vector<std::string> arguments;
    std::string says;
  };
  for (const Case& c :
       {Case{{"stat"}, "unknown command \"stat\"; allowed commands: status, devices"},
        {{"bogus"}, "unknown command \"bogus\""},
        {{"--bogus"}, "unknown option \"--bogus\""},
        {{"set", "session", "1"}, "unknown command \"set session\"; allowed commands: device, group"},
        {{"evict"}, "evict needs a command; allowed: session, group"},
        {{}, "epctl needs a command; allowed: status"},
        {{"stats", "nogroup"}, "stats: \"nogroup\" is not expected; allowed: --ranks, --socket"},
        {{"watch", "--interval-ms", "0"},
         "watch: \"--interval-ms\" is not expected; allowed: --interval, --count"},
        {{"waits", "one", "two"}, "waits: \"two\" is not expected; allowed: GROUP, --socket"}}) {
    const Finished result = epctl(c.arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_TRUE(result.complains(c.says)) << c.says << "\n" << result.err;
  }
  const Json json = epctl({"--json", "stat"}).json();
  EXPECT_NE(json["error"]["message"].get<std::string>().find("\"stat\""), std::string::npos) << json;
}

// "ID is required", of whom?
TEST_F(CtlTest, ComplaintsOfTheParserDidNotSayWhose) {
  EXPECT_EQ(epctl({"op"}).err.substr(0, 23), "epctl: op: ID is requir");
  EXPECT_TRUE(epctl({"evict", "session"}).complains("epctl: evict session: ID is required"));
  EXPECT_TRUE(epctl({"stat"}).complains("epctl: unknown command"));
}

TEST_F(CtlTest, NumbersAreDecimalAndInRange) {
  struct Case {
    std::vector<std::string> arguments;
    std::string says;
  };
  for (const Case& c :
       {Case{{"evict", "session", "010"}, "\"010\" is refused; allowed: 0..18446744073709551615"},
        {{"evict", "group", "late", "rank", "4294967296"}, "\"4294967296\""},
        {{"--timeout-ms", "0x10", "status"}, "\"0x10\" is refused; allowed: 1..600000"},
        {{"watch", "--count", "0"}, "\"0\" is refused; allowed: 1..4294967295"},
        {{"watch", "--interval", "010"}, "\"010\" is refused; allowed: 0.05..3600 seconds"},
        {{"events", "--since", "1e3"}, "\"1e3\""},
        {{"set", "device", "host:0", "sms=010"}, "sms is \"010\""}}) {
    const Finished result = epctl(c.arguments);
    EXPECT_EQ(result.exit_code, 2) << c.says;
    EXPECT_TRUE(result.complains(c.says)) << c.says << "\n" << result.err;
    EXPECT_LT(result.err.size(), 300u);
  }
}

TEST_F(CtlTest, TextsUnderJsonAreDocumentsToo) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--json", "--help"},
                                                    {"--json", "--version"},
                                                    {"status", "--json", "--help"},
                                                    {"--json", "completion", "bash"}}) {
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    ASSERT_FALSE(result.json().is_discarded()) << result.out;
    EXPECT_NE(result.json()["text"].get<std::string>().find("epctl"), std::string::npos);
  }
}

TEST_F(CtlTest, FailuresOfEventsAndWatchAreALineLikeTheOthers) {
  for (const char* command : {"events", "watch"}) {
    const Finished result = epctl({"--json", command});
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_FALSE(result.json().is_discarded());
    EXPECT_EQ(result.out.find('\n'), result.out.size() - 1) << result.out;
  }
}

TEST_F(CtlTest, ASettingThatIsGivenTwiceIsRefusedByName) {
  start_server();
  const Finished device = epctl({"set", "device", "host:0", "sms=1", "sms=2"});
  EXPECT_EQ(device.exit_code, 2);
  EXPECT_TRUE(device.complains("setting \"sms\" is given twice; allowed: once")) << device.err;
  const Finished group = epctl({"set", "group", "late", "priority=1", "sms=1", "priority=1"});
  EXPECT_EQ(group.exit_code, 2);
  EXPECT_TRUE(group.complains("setting \"priority\" is given twice")) << group.err;
  ASSERT_TRUE(server_->write("asked\n"));
  ASSERT_TRUE(server_->read_until("done\n"));
}

// gRPC and protobuf complained in lines of their own; the answer was "INTERNAL: ".
TEST_F(CtlTest, WordsThatNoMessageCarriesAreRefused) {
  start_server();
  const std::string odd = "a\xff\xfe";
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"evict", "group", odd, "rank", "1"},
        {"set", "device", odd, "sms=1"},
        {"set", "group", odd, "sms=1"},
        {"restart", "device", odd},
        {"op", odd},
        {"evict", "session", "1", "--reason", odd}}) {
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
    EXPECT_TRUE(result.complains("\"a\\xff\\xfe\" is not UTF-8")) << result.err;
  }
  const std::string program = EPCTL_PATH;
  const Finished far = Process({program, "--socket", "/tmp/" + std::string(200, 'x'), "status"}).finish();
  EXPECT_EQ(far.exit_code, 2);
  EXPECT_TRUE(far.complains("has 205 characters; allowed: 1..107")) << far.err;
  EXPECT_FALSE(far.complains("parse_address")) << far.err;
}

// epctl with its standard output elsewhere; what it says on standard error comes back.
Finished epctl_into(const std::string& redirection, const std::string& socket, const std::string& arguments) {
  const std::string program = EPCTL_PATH;
  return Process({"/bin/sh", "-c",
                  program + " --timeout-ms 20000 --socket " + socket + " " + arguments + " " + redirection})
      .finish();
}

TEST_F(CtlTest, AnAnswerThatCannotBeWrittenIsAFailure) {
  start_server();
  for (const char* arguments :
       {"status", "--json status", "devices", "op 11:500", "stats", "waits", "events", "--json events",
        "watch --interval 0.05 --count 3", "--json watch --interval 0.05", "config", "doctor", "version",
        "set device host:0 sms=2", "evict session 11", "restart device host:0", "completion bash", "--help",
        "--version"}) {
    const Finished full = epctl_into(">/dev/full", control_, arguments);
    EXPECT_EQ(full.exit_code, 5) << arguments << full.err;
    EXPECT_TRUE(
        full.complains("could not write the whole answer to standard output: No space left on device"))
        << arguments << full.err;
  }
  const Finished refused = epctl_into(">/dev/full", control_, "--json frobnicate");
  EXPECT_EQ(refused.exit_code, 2) << "what went wrong first";
  EXPECT_TRUE(refused.complains("could not write the whole answer")) << refused.err;
}

// The descriptor would be the socket's to the daemon, and the answer would go there.
TEST_F(CtlTest, AClosedStandardOutputIsAFailure) {
  start_server();
  for (const char* closed : {">&-", "<&- >&-"}) {
    const Finished result = epctl_into(closed, control_, "status");
    EXPECT_EQ(result.exit_code, 5) << closed << result.err;
  }
  EXPECT_EQ(epctl_into("2>&- >&-", control_, "status").exit_code, 5);
  EXPECT_EQ(epctl_into("2>&-", control_, "status").exit_code, 0);
}

}  // namespace
}  // namespace epd::ctl
