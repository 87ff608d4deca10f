// An engine's process: its end is found without waiting for it.
#include "engine_process.h"

#include "common/fd.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>

namespace epd::supervisor {
namespace {

class EngineProcesses : public testing::Test {
 protected:
  EngineProcesses() {
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-engine-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~EngineProcesses() override { std::filesystem::remove_all(directory_); }

  // In place of an engine: a program that does this.
  std::unique_ptr<EngineProcess> start(const std::string& line) {
    const std::string program = directory_ + "/engine";
    std::ofstream(program) << "#!/bin/sh\n" << line << "\n";
    ::chmod(program.c_str(), 0700);
    return start_program(program);
  }
  std::unique_ptr<EngineProcess> start_program(const std::string& program) {
    EngineCommand command;
    command.binary = program;
    command.device = "host:0";
    command.page_fd = command.bell_fd = bell_.get();
    auto process = EngineProcess::spawn(command);
    EXPECT_TRUE(process.ok()) << process.status().message();
    return process.ok() ? std::move(process).value() : nullptr;
  }
  // Generous: how long it took is not looked at.
  static std::optional<std::string> end_of(EngineProcess& process) {
    std::optional<std::string> how;
    for (int i = 0; i < 2000 && !(how = process.reap()); ++i) ::usleep(10'000);
    return how;
  }

  std::string directory_;
  UniqueFd bell_ = std::move(make_eventfd()).value();
};

TEST_F(EngineProcesses, OneThatStillRunsIsNotWaitedFor) {
  const auto process = start("exec sleep 1000");
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(process->reap(), std::nullopt);
  EXPECT_EQ(process->reap(), std::nullopt);
  process->kill();
  EXPECT_EQ(end_of(*process), "signal 9");
  EXPECT_EQ(process->exit_code(), -1);
}

TEST_F(EngineProcesses, ItsExitIsTold) {
  const auto process = start("exit 3");
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(end_of(*process), "exit 3");
  EXPECT_EQ(process->exit_code(), 3);
}

// Nothing said that /proc was missing.
TEST_F(EngineProcesses, OneThatCannotBeExecutedTellsWhy) {
  const auto said_of = [this](const std::string& program) {
    testing::internal::CaptureStderr();
    const auto process = start_program(program);
    const auto end = process == nullptr ? std::nullopt : end_of(*process);
    EXPECT_EQ(end, "exit 127");
    return testing::internal::GetCapturedStderr();
  };
  const std::string missing = directory_ + "/nowhere";
  EXPECT_EQ(said_of(missing),
            "epd: the engine's binary " + missing + " can't be executed: No such file or directory\n");
  EXPECT_EQ(said_of("/proc/nothing"),
            "epd: the engine's binary /proc/nothing can't be executed: No such file or directory; "
            "is /proc mounted?\n");
}

// The kernel's OOM killer takes an engine before the supervisor, which all engines need.
TEST_F(EngineProcesses, ItIsEndedFirstWhenMemoryIsShort) {
  int own = 0;
  std::ifstream("/proc/self/oom_score_adj") >> own;
  const auto process = start("cat /proc/self/oom_score_adj > " + directory_ + "/score");
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(end_of(*process), "exit 0");
  int score = -1;
  std::ifstream(directory_ + "/score") >> score;
  EXPECT_EQ(score, std::min(own + 500, 1000));
}

TEST_F(EngineProcesses, OneThatIsNotWantedAnyMoreIsKilled) {
  auto process = start("exec sleep 1000");
  ASSERT_NE(process, nullptr);
  const pid_t pid = process->pid();
  process.reset();
  EXPECT_NE(::access(("/proc/" + std::to_string(pid)).c_str(), F_OK), 0);
}

}  // namespace
}  // namespace epd::supervisor
