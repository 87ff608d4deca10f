// epctl as a child process, and a control plane without a daemon for it to talk to.
#pragma once

#include "common/signal.h"
#include "format.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace epd::ctl {
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Only so that a hang ends.
inline constexpr milliseconds kHang(30'000);

struct Finished {
  int exit_code = -1;  // -1: a signal, or the time limit
  std::string out;
  std::string err;

  Json json() const { return Json::parse(out, nullptr, false); }
  bool says(const std::string& text) const { return out.find(text) != std::string::npos; }
  bool complains(const std::string& text) const { return err.find(text) != std::string::npos; }
};

// A child process with pipes to its standard streams.
class Process {
 public:
  explicit Process(std::vector<std::string> command, const std::vector<std::string>& environment = {}) {
    int in[2];
    int out[2];
    int err[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) return;
    std::vector<char*> arguments;
    arguments.reserve(command.size() + 1);
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(in[0], STDIN_FILENO);
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      ::unsetenv("EPD_CONTROL_SOCKET");
      ::unsetenv("EPD_SOCKET");
      for (const std::string& variable : environment) ::putenv(const_cast<char*>(variable.c_str()));
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    ::close(err[1]);
    in_ = in[1];
    out_ = out[0];
    err_ = err[0];
  }
  ~Process() {
    close_input();
    if (pid_ > 0) {
      send_signal(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(out_);
    ::close(err_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool write(const std::string& text) {
    return ::write(in_, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }
  void signal(int number) const { send_signal(pid_, number); }
  void close_input() {
    if (in_ >= 0) ::close(in_);
    in_ = -1;
  }
  // Until standard output holds `text` or ends.
  bool read_until(const std::string& text) {
    const auto give_up = steady_clock::now() + kHang;
    while (out_text_.find(text) == std::string::npos) {
      if (steady_clock::now() > give_up || !read_some()) return false;
    }
    out_text_.erase(0, out_text_.find(text) + text.size());
    return true;
  }
  // Waits for nothing.
  bool has_ended() const {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }
  Finished finish() {
    close_input();
    const auto give_up = steady_clock::now() + kHang;
    while (steady_clock::now() < give_up && read_some()) {
    }
    Finished result{-1, out_text_, err_text_};
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && steady_clock::now() < give_up) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    if (ended == pid_) {
      pid_ = -1;
      if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    }
    return result;
  }

 private:
  // False when both streams have ended.
  bool read_some() {
    pollfd streams[2] = {{out_open_ ? out_ : -1, POLLIN, 0}, {err_open_ ? err_ : -1, POLLIN, 0}};
    ::poll(streams, 2, 200);
    char buffer[4096];
    for (int i = 0; i < 2; ++i) {
      if (streams[i].fd < 0 || streams[i].revents == 0) continue;
      const ssize_t got = ::read(streams[i].fd, buffer, sizeof(buffer));
      if (got > 0) {
        (i == 0 ? out_text_ : err_text_).append(buffer, static_cast<std::size_t>(got));
      } else {
        (i == 0 ? out_open_ : err_open_) = false;
      }
    }
    return out_open_ || err_open_;
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, err_ = -1;
  bool out_open_ = true, err_open_ = true;
  std::string out_text_, err_text_;
};

class CtlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/epd-ctl-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
    control_ = directory_ + "/control.sock";
    attach_ = directory_ + "/epd.sock";
  }
  void TearDown() override {
    if (server_) {
      const Finished ended = server_->finish();
      EXPECT_EQ(ended.exit_code, 0) << ended.err;
    }
    ::unlink(control_.c_str());
    ::unlink(attach_.c_str());
    EXPECT_EQ(::rmdir(directory_.c_str()), 0) << "something was left behind";
  }
  void start_server() {
    server_.emplace(std::vector<std::string>{FAKE_CONTROL_PATH, control_, attach_});
    ASSERT_TRUE(server_->read_until("ready\n"));
  }
  void tell_server(const std::string& line) {
    ASSERT_TRUE(server_->write(line + "\n"));
    ASSERT_TRUE(server_->read_until("done\n"));
  }
  Finished epctl(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
    std::vector<std::string> command{EPCTL_PATH, "--socket", control_};
    // A busy machine may need longer than epctl's own 2 s, which would prove nothing.
    if (!arguments.empty() && arguments[0] != "--timeout-ms")
      command.insert(command.end(), {"--timeout-ms", "20000"});
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Process(std::move(command), environment).finish();
  }

  std::string directory_, control_, attach_;
  std::optional<Process> server_;
};

}  // namespace epd::ctl
