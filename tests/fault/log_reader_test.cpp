// A reader of standard error that goes away, or is stopped, costs lines and nothing else.
#include "common/signal.h"
#include "fault.h"

#include "common/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {
namespace {

constexpr double kPatienceS = 10;  // generous: only a hang takes that long

class LogReader : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    read_.reset(ends[0]);
    write_.reset(ends[1]);
    DaemonOptions options;
    options.devices = 2;
    options.settings = {{"log.level", "\"debug\""}};
    options.log_fd = write_.get();
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
  }

  void attach_and_go(int times) const {
    for (int i = 0; i < times; ++i) {
      const Session session(daemon_->socket(), daemon_->device(static_cast<std::uint32_t>(i)));
    }
  }

  // Some ten lines each, most of them for debugging, which no limit of rate leaves out.
  void join_and_leave(int times) const {
    const Case c = fault_case(1, 1);
    const Session session(daemon_->socket(), daemon_->device(1));
    for (int i = 0; i < times; ++i) {
      const Group group(session, c.config("log", 0));
    }
  }

  void expect_serves() const {
    attach_and_go(2);
    EXPECT_EQ(daemon_->epctl({"status"}, kPatienceS).exit_code, 0);
  }

  void expect_engine_comes_back() const {
    const pid_t engine = daemon_->engine(0);
    ASSERT_GT(engine, 0);
    send_signal(engine, SIGKILL);
    EXPECT_TRUE(eventually(kPatienceS, [&] {
      const pid_t next = daemon_->engine(0);
      return next > 0 && next != engine &&
             daemon_->epctl({"--json", "devices"}).out.find("\"restarts\": 1") != std::string::npos;
    })) << daemon_->epctl({"devices"}).out;
    const std::string devices = daemon_->epctl({"devices"}).out;
    EXPECT_EQ(devices.find("failed"), std::string::npos) << devices;
    EXPECT_EQ(devices.find("signal 13"), std::string::npos) << devices;
  }

  UniqueFd read_;
  UniqueFd write_;
  std::unique_ptr<Daemon> daemon_;
};

TEST_F(LogReader, OneThatHasGoneTakesNoEngineAlong) {
  write_.reset();
  read_.reset();
  expect_serves();
  expect_engine_comes_back();
  expect_serves();
  const std::string events = daemon_->epctl({"events"}).out;
  EXPECT_NE(events.find("log lines lost"), std::string::npos) << events;
  daemon_->stop();
}

TEST_F(LogReader, OneThatStandsStillHoldsNothingUp) {
  // Full to the last byte, as it is after some lines that nobody reads.
  const std::vector<char> bytes(1 << 16, 'x');
  ASSERT_EQ(::fcntl(write_.get(), F_SETFL, O_NONBLOCK), 0);
  while (::write(write_.get(), bytes.data(), bytes.size()) > 0) {
  }
  ASSERT_EQ(::fcntl(write_.get(), F_SETFL, 0), 0);
  join_and_leave(400);  // far more lines than the queue holds
  expect_serves();
  expect_engine_comes_back();
  // Read again: what was lost is said.
  std::string text;
  ASSERT_EQ(::fcntl(read_.get(), F_SETFL, O_NONBLOCK), 0);
  std::vector<char> got(1 << 16);
  EXPECT_TRUE(eventually(kPatienceS, [&] {
    for (ssize_t n; (n = ::read(read_.get(), got.data(), got.size())) > 0;)
      text.append(got.data(), static_cast<std::size_t>(n));
    join_and_leave(1);
    return text.find("log lines lost") != std::string::npos;
  }));
  EXPECT_NE(daemon_->epctl({"events"}).out.find("log lines lost"), std::string::npos);
}

// Only a counter grew.
TEST(LogDisk, AFullOneWasToldByNobody) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(full.valid());
  DaemonOptions options;
  options.devices = 1;
  options.log_fd = full.get();
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  std::string status;
  EXPECT_TRUE(eventually(kPatienceS, [&] {
    status = daemon.epctl({"status"}).out;
    return status.find("lost; standard error: No space left on device") != std::string::npos;
  })) << status;
  const CommandResult doctor = daemon.epctl({"doctor"});
  EXPECT_EQ(doctor.exit_code, 4);
  EXPECT_NE(doctor.out.find("is not written: standard error: No space left on device"), std::string::npos)
      << doctor.out;
  daemon.stop();
}

TEST_F(LogReader, ADaemonWhoseLogNobodyReadsStops) {
  const std::vector<char> bytes(1 << 16, 'x');
  ASSERT_EQ(::fcntl(write_.get(), F_SETFL, O_NONBLOCK), 0);
  while (::write(write_.get(), bytes.data(), bytes.size()) > 0) {
  }
  ASSERT_EQ(::fcntl(write_.get(), F_SETFL, 0), 0);
  attach_and_go(10);
  daemon_->stop();
}

}  // namespace
}  // namespace epd::test
