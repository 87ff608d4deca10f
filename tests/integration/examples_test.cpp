// The client's examples, run as a newcomer would: against a daemon, and without one.
#include "common/signal.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <signal.h>
#include <algorithm>
#include <string>
#include <thread>

namespace epd::test {
namespace {

std::size_t lines_with(const std::string& text, const std::string& piece) {
  std::size_t count = 0;
  for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++count;
  return count;
}

class Examples : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(daemon_.start()); }
  void TearDown() override { daemon_.stop(); }

  Daemon daemon_;
};

TEST_F(Examples, Minimal) {
  const CommandResult result = run_command({EPD_EXAMPLE_MINIMAL}, 60, {"EPD_SOCKET=" + daemon_.socket()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "received 8 rows\n");
}

TEST_F(Examples, MoeLayerInC) {
  for (const std::string ranks : {"2", "4", "7"}) {
    const CommandResult result =
        run_command({EPD_EXAMPLE_MOE_LAYER_C, "--ranks", ranks, daemon_.socket()}, 120);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(lines_with(result.out, "3 layers right"), std::stoul(ranks)) << result.out;
  }
}

TEST_F(Examples, MoeLayerInCpp) {
  for (const std::string ranks : {"2", "4", "7"}) {
    const CommandResult result =
        run_command({EPD_EXAMPLE_MOE_LAYER_CPP, "--ranks", ranks, daemon_.socket()}, 120);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(lines_with(result.out, "3 layers right"), std::stoul(ranks)) << result.out;
  }
}

TEST_F(Examples, RecoveryInCGoesOnAfterAnEngineWasKilled) {
  std::thread killer([this] {
    EXPECT_TRUE(eventually(60, [&] { return lines_with(daemon_.log(), " name=\"recovery-c-") == 2; }));
    send_signal(daemon_.engine(0), SIGKILL);
  });
  const CommandResult result =
      run_command({EPD_EXAMPLE_RECOVERY_C, "1"}, 120, {"EPD_SOCKET=" + daemon_.socket()});
  killer.join();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines_with(result.out, "operations right, epoch 2"), 2u) << result.out;
}

TEST_F(Examples, LibepdSaysWhatItDoesIfItIsAsked) {
  const std::string socket = "EPD_SOCKET=" + daemon_.socket();
  const auto run = [&](const std::string& log) {
    return run_command({EPD_EXAMPLE_MINIMAL}, 60, {socket, "EPD_LOG=" + log});
  };
  EXPECT_EQ(run("").err, "") << "off by default";
  EXPECT_EQ(run("off").err, "");
  EXPECT_EQ(run("error").err, "") << "nothing has failed";
  const CommandResult info = run("info");
  EXPECT_EQ(info.out, "received 8 rows\n") << "standard output is the program's";
  for (const char* event : {"attached", "joined", "left", "detached"}) {
    EXPECT_EQ(lines_with(info.err, std::string("level=info process=\"libepd\" pid=")), 4u) << info.err;
    EXPECT_EQ(lines_with(info.err, "event=\"" + std::string(event) + "\""), 1u) << info.err;
  }
  EXPECT_EQ(lines_with(info.err, "event=\"joined\" group=\"minimal\" rank=\"0\" ranks=\"1\""), 1u)
      << info.err;
  EXPECT_EQ(lines_with(run("debug").err, "level=debug process=\"libepd\""), 2u) << "a dispatch and a combine";
  const CommandResult loud = run("loud");
  EXPECT_EQ(loud.exit_code, 0);
  EXPECT_EQ(loud.err, "libepd: EPD_LOG is \"loud\"; allowed: off, error, info, debug\n");
}

TEST(ExamplesWithoutADaemon, LibepdNamesTheCallThatFailed) {
  const CommandResult result =
      run_command({EPD_EXAMPLE_MINIMAL}, 60, {"EPD_SOCKET=/nonexistent/epd.sock", "EPD_LOG=error"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_EQ(
      lines_with(result.err, "event=\"call failed\" call=\"epd_session_attach\" status=\"DAEMON_LOST\""), 1u)
      << result.err;
}

#ifdef EPD_EXAMPLE_MOE_GRAPH_C
TEST(ExamplesOnGpus, MoeGraphInC) {
  DaemonOptions options;
  use_devices(options, "cuda");
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  for (const std::string ranks : {"1", "2", "4"}) {
    const CommandResult result =
        run_command({EPD_EXAMPLE_MOE_GRAPH_C, "--ranks", ranks, daemon.socket()}, 120);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(lines_with(result.out, "5 replays right"), std::stoul(ranks)) << result.out;
  }
  daemon.stop();
}
#endif

TEST(ExamplesAlone, SayThatNobodyListens) {
  for (const std::string program :
       {EPD_EXAMPLE_MINIMAL, EPD_EXAMPLE_MOE_LAYER_C, EPD_EXAMPLE_MOE_LAYER_CPP}) {
    const CommandResult result = run_command({program}, 60, {"EPD_SOCKET=/nonexistent/epd.sock"});
    EXPECT_EQ(result.exit_code, 1) << program;
    EXPECT_NE(result.err.find("no daemon listens at /nonexistent/epd.sock"), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace epd::test
