// Notifications to systemd: READY, STATUS, RELOADING, WATCHDOG and STOPPING, over a notify socket of the
// test's own.
#include "common/signal.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {
namespace {

// An abstract socket, and everything that was sent to it.
class ServiceManager {
 public:
  // `watchdog_ms`: how long the daemon may be silent; 0: as long as it likes.
  explicit ServiceManager(unsigned watchdog_ms = 0)
      : fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    const std::string name = "@epd-notify-" + std::to_string(::getpid());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    address.sun_path[0] = '\0';
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    EXPECT_EQ(::bind(fd_, reinterpret_cast<const sockaddr*>(&address), length), 0);
    ::setenv("NOTIFY_SOCKET", name.c_str(), 1);
    if (watchdog_ms != 0) ::setenv("WATCHDOG_USEC", std::to_string(watchdog_ms * 1000).c_str(), 1);
  }
  ~ServiceManager() {
    ::unsetenv("NOTIFY_SOCKET");
    ::unsetenv("WATCHDOG_USEC");
    ::close(fd_);
  }
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  // All messages so far, in order.
  const std::vector<std::string>& told() {
    char buffer[1024];
    for (ssize_t n = 0; (n = ::recv(fd_, buffer, sizeof(buffer), 0)) >= 0;)
      told_.emplace_back(buffer, static_cast<std::size_t>(n));
    return told_;
  }
  std::string text_from(std::size_t first) {
    std::string all;
    for (std::size_t i = first; i < told().size(); ++i) all += told_[i] + "\n";
    return all;
  }
  // As its last word.
  bool comes_to_say(const std::string& text) {
    return eventually(20, [&] { return !told().empty() && told_.back().find(text) != std::string::npos; });
  }
  std::size_t pings() {
    const std::vector<std::string>& all = told();
    return static_cast<std::size_t>(std::count(all.begin(), all.end(), "WATCHDOG=1"));
  }
  bool comes_to_ping_again(std::size_t times) {
    const std::size_t before = pings();
    return eventually(20, [&] { return pings() >= before + times; });
  }

 private:
  int fd_;
  std::vector<std::string> told_;
};

constexpr unsigned kWatchdogMs = 3000;

// Expects that the watchdog is fed, that it is not while `process` is stopped, and that it is again
// afterwards.
void expect_that_the_watchdog_needs(pid_t process, ServiceManager& manager) {
  ASSERT_GT(process, 0);
  ASSERT_TRUE(manager.comes_to_ping_again(2)) << "it is not fed while all is well";
  send_signal(process, SIGSTOP);
  sleep_ms(kWatchdogMs * 3 / 4);  // a ping for what was done before may still come
  const std::size_t before = manager.pings();
  sleep_ms(kWatchdogMs + 1000);  // systemd would have ended the service by now
  EXPECT_EQ(manager.pings(), before);
  send_signal(process, SIGCONT);
  EXPECT_TRUE(manager.comes_to_ping_again(2)) << "it is not fed again";
}

// Its engine's page still had the last heartbeat of the stopped one.
TEST(OperatorStatus, ADeviceThatIsStartedAnewIsNotCalledStopped) {
  ServiceManager manager;
  DaemonOptions options;
  options.devices = 2;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  ASSERT_TRUE(manager.comes_to_say("STATUS=serving: 2 devices, 0 sessions"));
  send_signal(daemon.engine(0), SIGSTOP);
  ASSERT_TRUE(manager.comes_to_say("serving: 2 devices (host:0 is stopped)"));
  sleep_ms(3500);  // beyond the time after which a silent engine is stopped
  const std::size_t before = manager.told().size();
  EXPECT_EQ(daemon.epctl({"restart", "device", "host:0"}).exit_code, 0);
  ASSERT_TRUE(manager.comes_to_say("STATUS=serving: 2 devices, 0 sessions"));
  sleep_ms(1500);
  const std::string all = manager.text_from(before);
  EXPECT_EQ(all.find("stopped"), std::string::npos) << all;
  EXPECT_NE(all.find("STATUS=serving: 2 devices (host:0 restarts), 0 sessions"), std::string::npos) << all;
  EXPECT_EQ(manager.told().back(), "STATUS=serving: 2 devices, 0 sessions, 0 groups");
  daemon.stop();
}

TEST(OperatorStatus, StartReloadAndEndAreTold) {
  ServiceManager manager;
  DaemonOptions options;
  options.devices = 1;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  ASSERT_TRUE(manager.comes_to_say("STATUS=serving: 1 device"));
  daemon.signal(SIGHUP);
  EXPECT_TRUE(eventually(20, [&] {
    const std::string so_far = manager.text_from(0);
    const std::size_t reloading = so_far.find("RELOADING=1");
    return reloading != std::string::npos && so_far.find("READY=1", reloading) != std::string::npos;
  }));
  daemon.stop();
  const std::string all = manager.text_from(0);
  std::size_t at = 0;
  for (const char* part : {"STATUS=starting", "READY=1", "STATUS=serving",
                           "RELOADING=1\nMONOTONIC_USEC=", "READY=1", "STOPPING=1", "STATUS=stopping"}) {
    at = all.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " is missing, or out of order: " << all;
    ++at;
  }
  // Engines that end with the daemon are in no trouble.
  EXPECT_EQ(all.find("restarts"), std::string::npos) << all;
}

// systemd killed the daemon in the middle of such a drain, and started it again.
TEST(OperatorStatus, ADrainBeyondTheTimeToStopAsksForMore) {
  ServiceManager manager;
  DaemonOptions options;
  options.devices = 1;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  RankProcess client([&]() -> std::string {
    const Session session(daemon.socket(), "host:0");
    sleep_ms(60'000);
    return "";
  });
  ASSERT_TRUE(manager.comes_to_say("1 session"));
  EXPECT_EQ(daemon.epctl({"drain", "--timeout-ms", "600000"}).exit_code, 0);
  EXPECT_TRUE(eventually(20, [&] {
    return manager.text_from(0).find("STOPPING=1\nEXTEND_TIMEOUT_USEC=610000000\n") != std::string::npos;
  })) << manager.text_from(0);
  daemon.stop();
  client.kill(SIGKILL);
}

TEST(OperatorStatus, AStoppedEngineStopsTheWatchdog) {
  ServiceManager manager(kWatchdogMs);
  DaemonOptions options;
  options.devices = 2;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  expect_that_the_watchdog_needs(daemon.engine(1), manager);
  daemon.stop();
}

TEST(OperatorStatus, AStoppedSupervisorStopsTheWatchdog) {
  ServiceManager manager(kWatchdogMs);
  DaemonOptions options;
  options.devices = 1;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  expect_that_the_watchdog_needs(daemon.pid(), manager);
  daemon.stop();
}

// systemctl reported success, and nothing said that the old configuration was still in force.
TEST(OperatorStatus, ARefusedReloadIsToldUntilOneSucceeds) {
  ServiceManager manager;
  DaemonOptions options;
  options.devices = 1;
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  ASSERT_TRUE(manager.comes_to_say("STATUS=serving: 1 device"));
  daemon.rewrite({{"limits.max_sessions", "0"}});
  daemon.signal(SIGHUP);
  EXPECT_TRUE(manager.comes_to_say("0 groups; the last reload was refused, the log says why"));
  daemon.rewrite({{"limits.max_sessions", "3"}});
  daemon.signal(SIGHUP);
  EXPECT_TRUE(eventually(20, [&] { return manager.told().back().ends_with("0 groups"); }));
  daemon.stop();
}

}  // namespace
}  // namespace epd::test
