// Descriptors of the supervisor: what clients may make it hold, and what is left for its own work.
#include "common/signal.h"
#include "fault.h"

#include "support/census.h"
#include "support/raw_client.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {
namespace {

constexpr std::uint32_t kLimit = 1200;

void become(std::uint32_t user) {
  RANK_CHECK(::setgroups(0, nullptr) == 0 && ::setresgid(user, user, user) == 0 &&
                 ::setresuid(user, user, user) == 0,
             "become user " + std::to_string(user));
}

// Attaches until it is refused, and returns the refusal. The clients stay attached.
std::string attach_until_refused(const std::string& socket, const char* device,
                                 std::vector<std::unique_ptr<RawClient>>& clients) {
  for (int i = 0; i < 2000; ++i) {
    clients.push_back(std::make_unique<RawClient>(socket));
    RANK_CHECK(clients.back()->valid(), "connect");
    abi::Hello hello = RawClient::good_hello();
    abi::set_text(hello.device, device, std::strlen(device));
    if (!clients.back()->send(abi::AttachType::kHello, &hello, sizeof(hello)))
      return refusal(clients.back()->receive(10));
    const std::optional<Packet> answer = clients.back()->receive(10);
    RANK_CHECK(answer.has_value(), "no answer to Hello " + std::to_string(i));
    if (answer->header.type != static_cast<std::uint16_t>(abi::AttachType::kWelcome)) return refusal(answer);
  }
  return "never refused";
}

// It would serve, and refuse every client; with fewer still its engines could not load their libraries.
TEST(Descriptors, ADaemonWithTooFewDoesNotStart) {
  const CommandResult result = run_command(
      {"/bin/sh", "-c",
       "ulimit -n 511; exec \"$0\" serve --config /dev/null --devices.cuda none --socket /nowhere/s",
       daemon_program()},
      20);
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.err.find("RLIMIT_NOFILE is 511; allowed: 512 or more"), std::string::npos) << result.err;
}

TEST(Descriptors, NobodyCanTakeWhatOthersAndEnginesNeed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
  DaemonOptions options;
  options.devices = 2;
  options.max_descriptors = kLimit;
  options.settings = {{"daemon.socket_mode", "\"0666\""},
                      {"limits.max_sessions", "4096"},
                      {"limits.max_sessions_per_user", "4096"}};
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  ASSERT_EQ(::chmod(daemon.directory().c_str(), 0755), 0);
  struct Stage {
    Gate full[2];
    Gate done;
  };
  Shared<Stage> stage;
  std::vector<RankProcess> users;
  for (std::uint32_t i = 0; i < 2; ++i) {
    users.emplace_back([&, i]() -> std::string {
      become(61001 + i);
      std::vector<std::unique_ptr<RawClient>> clients;
      const std::string refused = attach_until_refused(daemon.socket(), "host:0", clients);
      stage->full[i].open();
      RANK_CHECK(
          refused.find("RESOURCE_EXHAUSTED") == 0 && refused.find("RLIMIT_NOFILE") != std::string::npos,
          refused);
      stage->done.wait_for(1);
      return "";
    });
    stage->full[i].wait_for(1);
    // Another user has its place still, as long as it is not the third.
    if (i == 0) {
      const Session session(daemon.socket(), "host:1");
    }
  }
  // The reserve is the daemon's: an engine that dies is started again.
  const pid_t engine = daemon.engine(1);
  ASSERT_GT(engine, 0);
  send_signal(engine, SIGKILL);
  EXPECT_TRUE(eventually(20, [&] { return daemon.engine(1) > 0 && daemon.engine(1) != engine; }));
  EXPECT_EQ(daemon.epctl({"status"}).exit_code, 0);
  const std::string devices = daemon.epctl({"devices"}).out;
  EXPECT_EQ(devices.find("failed"), std::string::npos) << devices;
  stage->done.open();
  for (RankProcess& user : users) EXPECT_TRUE(user.wait(30).ok);
  EXPECT_TRUE(eventually(10, [&] {
    const Session session(daemon.socket(), "host:0");
    return true;
  }));
  daemon.stop();
}

// A machine without space for another process, or a supervisor without space for its link: the device waits.
TEST(Descriptors, AnEngineThatCantBeStartedForWantOfThemHasNotDied) {
  DaemonOptions options;
  options.devices = 2;
  options.settings = {{"engine.max_restarts_per_minute", "2"}};
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  rlimit before{};
  ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit none{8, before.rlim_max};
  ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  const pid_t engine = daemon.engine(1);
  ASSERT_GT(engine, 0);
  send_signal(engine, SIGKILL);
  const auto logged = [&](const char* text) { return daemon.log().find(text) != std::string::npos; };
  EXPECT_TRUE(eventually(20, [&] { return logged("engine not started yet"); }));
  sleep_ms(1500);  // some seven attempts
  EXPECT_EQ(daemon.engine(1), -1);
  ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  EXPECT_TRUE(eventually(20, [&] { return daemon.engine(1) > 0; }));
  EXPECT_FALSE(logged("device failed"));
  EXPECT_TRUE(
      eventually(20, [&] { return daemon.epctl({"devices"}).out.find("failed") == std::string::npos; }));
  { const Session session(daemon.socket(), "host:1"); }
  daemon.stop();
}

// An engine that is stopped reads nothing: what it is to be told of sessions that have gone stays in its
// link.
TEST(Descriptors, SessionsThatAStoppedEngineHasToLetGoCount) {
  DaemonOptions options;
  options.devices = 2;
  options.settings = {{"limits.max_sessions_per_user", "24"}};
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  const pid_t engine = daemon.engine(1);
  ASSERT_GT(engine, 0);
  const std::size_t before = take_census(daemon.pid()).fds;
  ASSERT_EQ(send_signal(engine, SIGSTOP), 0);
  std::string refused;
  for (int i = 0; i < 100 && refused.empty(); ++i) {
    epd_session_t* session = nullptr;
    epd_attach_options_t args;
    epd_attach_options_init(&args);
    args.socket_path = daemon.socket().c_str();
    args.device = "host:1";
    if (epd_session_attach(&args, &session) == EPD_OK) {
      epd_session_detach(session);
    } else {
      refused = epd_last_error();
    }
  }
  EXPECT_NE(refused.find("24 sessions that have ended"), std::string::npos) << refused;
  EXPECT_NE(refused.find("limits.max_sessions_per_user"), std::string::npos) << refused;
  EXPECT_LT(take_census(daemon.pid()).fds, before + 2 * 24 * 10);
  ASSERT_EQ(send_signal(engine, SIGCONT), 0);
  EXPECT_TRUE(eventually(20, [&] {
    epd_session_t* session = nullptr;
    epd_attach_options_t args;
    epd_attach_options_init(&args);
    args.socket_path = daemon.socket().c_str();
    args.device = "host:1";
    if (epd_session_attach(&args, &session) != EPD_OK) return false;
    epd_session_detach(session);
    return true;
  }));
  daemon.stop();
}

}  // namespace
}  // namespace epd::test
