// MPS's control program is asked in the right order, about the right process, and never for too long.
#include "mps.h"
#include "common/signal.h"
#include "process_state.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>

namespace epd::supervisor {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kHangMs = 20'000;

// A process that does nothing until it is let go.
class Idle {
 public:
  Idle() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) ::pause();
    }
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }
  ~Idle() { end(); }
  void end() {
    if (pid_ <= 0) return;
    send_signal(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ended_ = std::exchange(pid_, -1);
  }
  pid_t pid() const { return pid_ > 0 ? pid_ : ended_; }
  UniqueFd pidfd() const { return std::move(duplicate(pidfd_.get())).value(); }

 private:
  pid_t pid_;
  pid_t ended_ = -1;
  UniqueFd pidfd_;
};

// A process that is on its way out and stays there: its first thread has ended, another one has not.
class Leaving {
 public:
  Leaving() : pid_(::fork()) {
    if (pid_ == 0) {
      std::thread([] {
        for (;;) ::pause();
      }).detach();
      ::syscall(SYS_exit, 0);
    }
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }
  ~Leaving() {
    send_signal(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  bool reached() const {
    for (int i = 0; i < 2000 && !is_ending(pid_); ++i) ::usleep(5000);
    return is_ending(pid_);
  }
  pid_t pid() const { return pid_; }
  UniqueFd pidfd() const { return std::move(duplicate(pidfd_.get())).value(); }

 private:
  const pid_t pid_;
  UniqueFd pidfd_;
};

class Mps : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "epd-mps-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    ::setenv("EPD_FAKE_MPS_DIR", folder_.c_str(), 1);
    loop_ = std::move(Loop::create(loop_clock_)).value();
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
  }
  void list(const std::string& server, const std::vector<pid_t>& clients) const {
    std::ostringstream text;
    for (const pid_t pid : clients) text << pid << "\n";
    write("clients-" + server, text.str());
  }
  std::string asked() const {
    std::ifstream file(folder_ + "/asked");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::unique_ptr<MpsControl> start(const std::string& program = EPD_FAKE_MPS_CONTROL,
                                    std::uint32_t timeout_ms = kHangMs) const {
    return std::move(MpsControl::start(*loop_, clock_, {program, timeout_ms})).value();
  }
  // Runs the loop until the answer is there.
  template <typename Ask>
  Result<std::string> answer_to(Ask ask) {
    std::optional<Result<std::string>> answer;
    ask([&](const Result<std::string>& given) { answer = given; });
    const std::uint64_t give_up_ns = clock_.now_ns() + kHangMs * std::uint64_t{2'000'000};
    loop_->run([&] {
      if (answer || clock_.now_ns() > give_up_ns) loop_->stop();
      return give_up_ns;
    });
    return answer ? *answer : Result<std::string>(internal_error("no answer"));
  }
  template <typename Process>
  Result<std::string> terminate(MpsControl& control, const Process& target, std::vector<pid_t> ours) {
    return answer_to([&](auto answer) {
      control.terminate({target.pid(), target.pidfd(), std::move(ours), nullptr}, std::move(answer));
    });
  }
  void expect_left_alone(const Result<std::string>& answer, const char* why) const {
    EXPECT_EQ(answer.status().code(), StatusCode::kNotFound) << answer.status().to_string();
    EXPECT_NE(answer.status().message().find(why), std::string::npos) << answer.status().message();
    EXPECT_EQ(asked().find("terminate"), std::string::npos) << asked();
  }
  bool was_asked(const std::string& question) const {
    for (int i = 0; i < 2000 && asked().find(question) == std::string::npos; ++i) ::usleep(5000);
    return asked().find(question) != std::string::npos;
  }

  const MonotonicClock clock_{};
  LoopClock loop_clock_{clock_};
  std::unique_ptr<Loop> loop_;
  std::string folder_;
};

TEST_F(Mps, TerminatesAClientOfTheServerThatHasItAndTheEngine) {
  const Idle client;
  const Idle engine;
  write("servers", "10\n20\n");
  list("10", {1, 2});
  list("20", {engine.pid(), client.pid()});
  const Result<std::string> answer = terminate(*start(), client, {engine.pid()});
  ASSERT_TRUE(answer.ok()) << answer.status().to_string();
  EXPECT_NE(answer.value().find("by server 20"), std::string::npos) << answer.value();
  EXPECT_EQ(asked(), "get_server_list\nget_client_list 10\nget_client_list 20\nterminate_client 20 " +
                         std::to_string(client.pid()) + "\n");
}

TEST_F(Mps, LeavesAloneWhatItDoesNotKnow) {
  const Idle client;
  const Idle engine;
  write("servers", "10\n");
  list("10", {engine.pid()});
  const Result<std::string> answer = terminate(*start(), client, {engine.pid()});
  EXPECT_EQ(answer.status().code(), StatusCode::kNotFound) << answer.status().to_string();
  EXPECT_EQ(asked().find("terminate"), std::string::npos) << asked();
}

TEST_F(Mps, LeavesAloneANumberThatMayBeAnothers) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid(), 1});
  const Result<std::string> answer = terminate(*start(), client, {::getpid()});
  expect_left_alone(answer, "PID namespace");
}

TEST_F(Mps, LeavesAloneTheNumberOfAProcessThatHasEnded) {
  Idle client;
  const Idle engine;
  write("servers", "10\n");
  list("10", {engine.pid(), client.pid()});
  client.end();
  expect_left_alone(terminate(*start(), client, {engine.pid()}), "has ended");
}

TEST_F(Mps, LeavesAloneAProcessThatIsEnding) {
  const Leaving client;
  const Idle engine;
  write("servers", "10\n");
  list("10", {engine.pid(), client.pid()});
  ASSERT_TRUE(client.reached());
  const Result<std::string> answer = terminate(*start(), client, {engine.pid()});
  expect_left_alone(answer, "is ending by itself");
}

// While MPS is still asked who is there.
TEST_F(Mps, LeavesAloneAClientWhoseSessionHasEndedMeanwhile) {
  const Idle client;
  const Idle engine;
  write("servers", "10\n");
  list("10", {engine.pid(), client.pid()});
  write("hold", "");
  const auto left = std::make_shared<std::atomic<bool>>(false);
  const auto control = start();
  const Result<std::string> answer = answer_to([&](MpsControl::Answer given) {
    control->terminate({client.pid(), client.pidfd(), {engine.pid()}, left}, std::move(given));
    EXPECT_TRUE(was_asked("get_client_list"));
    *left = true;
    fs::remove(folder_ + "/hold");
  });
  expect_left_alone(answer, "has ended meanwhile");
}

TEST_F(Mps, AProgramThatHangsIsKilledInTime) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid()});
  write("hang", "");
  const auto control = start(EPD_FAKE_MPS_CONTROL, 300);
  const Result<std::string> answer = terminate(*control, client, {client.pid()});
  EXPECT_EQ(answer.status().code(), StatusCode::kDeadlineExceeded) << answer.status().to_string();
  EXPECT_NE(answer.status().message().find("mps.timeout_ms"), std::string::npos);
}

TEST_F(Mps, ItsEndDoesNotWaitForAProgramThatHangs) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid()});
  write("hang", "");
  auto control = start();
  control->terminate({client.pid(), client.pidfd(), {client.pid()}, nullptr},
                     [](const Result<std::string>&) { FAIL() << "nobody runs the loop"; });
  EXPECT_TRUE(was_asked("terminate"));
  const std::uint64_t begin_ns = clock_.now_ns();
  control.reset();
  EXPECT_LT(clock_.now_ns() - begin_ns, kHangMs * std::uint64_t{1'000'000} / 2)
      << "it waited for the time limit";
}

TEST_F(Mps, FailuresOfTheProgramAreTold) {
  const auto control = start("/no/such/program");
  const Result<std::string> missing = answer_to([&](auto answer) { control->probe({1}, std::move(answer)); });
  EXPECT_EQ(missing.status().code(), StatusCode::kUnsupported) << missing.status().to_string();
  EXPECT_NE(missing.status().message().find("mps.control"), std::string::npos);
}

TEST_F(Mps, WhatTheProgramSaysIsTold) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid()});
  write("says", "Operation not\npermitted\n");
  write("exit", "3");
  const Result<std::string> answer = terminate(*start(), client, {client.pid()});
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal);
  EXPECT_NE(answer.status().message().find("exit 3, Operation not permitted"), std::string::npos)
      << answer.status().message();
}

// The true one says so, and exits with 0.
TEST_F(Mps, AServerThatRefusesHasNotTerminated) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid()});
  write("says", "Invalid process 7!\n1\n");
  const Result<std::string> answer = terminate(*start(), client, {client.pid()});
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal);
  EXPECT_NE(answer.status().message().find("Invalid process 7! 1"), std::string::npos)
      << answer.status().message();
}

// Seen on 4 x H200 with driver 580.
TEST_F(Mps, TerminatingOneThatWasLeavingIsToldForWhatItMayMean) {
  const Idle client;
  write("servers", "10\n");
  list("10", {client.pid()});
  write("says", "201\n");
  const Result<std::string> answer = terminate(*start(), client, {client.pid()});
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal);
  for (const char* part : {"terminate_client: 201", "was leaving"})
    EXPECT_NE(answer.status().message().find(part), std::string::npos) << answer.status().message();
}

TEST_F(Mps, AProgramThatDoesNotKnowTheCommandIsNoHelp) {
  write("servers", "Unknown command \"get_server_list\"\n");
  const auto control = start();
  const Result<std::string> answer = answer_to([&](auto given) { control->probe({1}, std::move(given)); });
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal) << answer.status().to_string();
}

TEST_F(Mps, AProbeLooksForAnEngine) {
  write("servers", "10\n20\n");
  list("10", {1});
  list("20", {2, 3});
  const auto control = start();
  const Result<std::string> answer = answer_to([&](auto given) { control->probe({4, 3}, std::move(given)); });
  EXPECT_TRUE(answer.ok()) << answer.status().to_string();
  EXPECT_EQ(asked(), "get_server_list\nget_client_list 10\nget_client_list 20\n");
}

TEST_F(Mps, AProbeThatFindsNoEngineSaysWhatThatMeans) {
  write("servers", "10\n");
  list("10", {1, 2});
  const auto control = start();
  const Result<std::string> answer = answer_to([&](auto given) { control->probe({3}, std::move(given)); });
  EXPECT_EQ(answer.status().code(), StatusCode::kNotFound) << answer.status().to_string();
  EXPECT_NE(answer.status().message().find("PID namespace"), std::string::npos) << answer.status().message();
}

}  // namespace
}  // namespace epd::supervisor
