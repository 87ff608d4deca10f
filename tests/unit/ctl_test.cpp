// epctl, the program, run against a control plane without a daemon.
#include "json.h"

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
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Only so that a hang ends.
constexpr milliseconds kHang(30'000);

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
      ::kill(pid_, SIGKILL);
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
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Process(std::move(command), environment).finish();
  }

  std::string directory_, control_, attach_;
  std::optional<Process> server_;
};

TEST_F(CtlTest, StatusShowsDaemonAndDevices) {
  start_server();
  const Finished text = epctl({"status"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part : {"epd 0.1.0  serving", "up 1 h 2 m", "2 (17 since start, 1 refused)", "600.0 MiB",
                           "host:0  ready", "host:1  ready", "5.0 GiB", "3 ms ago"}) {
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  }
  EXPECT_TRUE(text.says(attach_));
  EXPECT_EQ(text.err, "");
  EXPECT_EQ(text.out.find('\x1b'), std::string::npos) << "no colours into a pipe";

  const Finished json = epctl({"status", "--json"});
  EXPECT_EQ(json.exit_code, 0);
  const Json document = json.json();
  ASSERT_TRUE(document.is_object()) << json.out;
  EXPECT_EQ(document["daemon"]["state"], "serving");
  EXPECT_EQ(document["daemon"]["sessions"], 2);
  EXPECT_EQ(document["daemon"]["arena_bytes"], std::uint64_t{600} << 20);
  EXPECT_EQ(document["daemon"]["last_reload_error"], "");
  ASSERT_EQ(document["devices"].size(), 2u);
  EXPECT_EQ(document["devices"][0]["name"], "host:0");
  EXPECT_EQ(document["devices"][0]["sleeping"], false);
}

TEST_F(CtlTest, EveryListPrintsATableAndADocument) {
  start_server();
  struct Case {
    std::string command, key, in_text;
    std::size_t size;
  };
  const std::vector<Case> cases{
      {"devices", "devices", "host:1  ready", 2},
      {"sessions", "sessions", "libepd 0.1.0", 2},
      {"groups", "groups", "layer-experts  active", 2},
      {"ops", "operations", "wait_ready  rank 1", 2},
      {"config", "entries", "limits.max_sessions  64     file  yes", 2},
  };
  for (const Case& c : cases) {
    const Finished text = epctl({c.command});
    EXPECT_EQ(text.exit_code, 0) << c.command << text.err;
    EXPECT_TRUE(text.says(c.in_text)) << c.command << "\n" << text.out;
    const Finished json = epctl({"--json", c.command});
    EXPECT_EQ(json.exit_code, 0) << c.command;
    ASSERT_TRUE(json.json().is_object()) << json.out;
    EXPECT_EQ(json.json()[c.key].size(), c.size) << c.command;
  }
  tell_server("empty");
  for (const Case& c : cases) {
    const Finished text = epctl({c.command});
    EXPECT_EQ(text.exit_code, 0) << c.command;
    EXPECT_EQ(text.out.substr(0, 3), "no ") << c.command << "\n" << text.out;
    const Json document = epctl({c.command, "--json"}).json();
    ASSERT_TRUE(document.is_object()) << c.command;
    EXPECT_EQ(document[c.key], Json::array()) << c.command;
  }
}

TEST_F(CtlTest, GroupsTellWhatTheyWaitFor) {
  start_server();
  const Finished plain = epctl({"groups"});
  EXPECT_TRUE(plain.says("group 10 (late): waits for 3 ranks: 0, 1, 3")) << plain.out;
  EXPECT_TRUE(plain.says("group 9 (layer-experts): last break: engine of host:1 restarted")) << plain.out;
  EXPECT_FALSE(plain.says("gone"));
  EXPECT_TRUE(epctl({"groups", "--members"}).says("gone"));
  const Json document = epctl({"groups", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["groups"][0]["shape"]["payload"], "fp8_cast");
  EXPECT_EQ(document["groups"][0]["shape"]["policy"], "fail_fast");
  EXPECT_EQ(document["groups"][1]["missing_ranks"], Json({0, 1, 3}));
}

TEST_F(CtlTest, VersionComparesBothSides) {
  const Finished alone = epctl({"version"});
  EXPECT_EQ(alone.exit_code, 3);
  EXPECT_TRUE(alone.says("epctl    0.1.0")) << alone.out;
  const Json alone_json = epctl({"version", "--json"}).json();
  ASSERT_TRUE(alone_json.is_object());
  EXPECT_TRUE(alone_json["daemon"].is_null());
  EXPECT_EQ(alone_json["error"]["class"], "unreachable");

  start_server();
  const Finished both = epctl({"version"});
  EXPECT_EQ(both.exit_code, 0);
  EXPECT_TRUE(both.says("epd      0.1.0")) << both.out;
  const Json document = epctl({"version", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["client"]["layout_hash"], document["daemon"]["layout_hash"]);
  EXPECT_FALSE(document.contains("error"));
}

TEST_F(CtlTest, NoDaemonIsUnreachableWhateverTheCommand) {
  for (const char* command : {"status", "devices", "sessions", "groups", "ops", "config", "drain"}) {
    const Finished text = epctl({command});
    EXPECT_EQ(text.exit_code, 3) << command;
    EXPECT_EQ(text.out, "") << command;
    EXPECT_TRUE(text.complains("no daemon listens at " + control_ + ": is epd running?")) << text.err;
    const Finished json = epctl({command, "--json"});
    EXPECT_EQ(json.exit_code, 3) << command;
    ASSERT_TRUE(json.json().is_object()) << json.out;
    EXPECT_EQ(json.json()["error"]["class"], "unreachable");
  }
}

TEST_F(CtlTest, ASocketThatWasLeftBehindAndAFileAreToldApart) {
  start_server();
  ASSERT_EQ(::rename(control_.c_str(), (control_ + ".kept").c_str()), 0);
  ASSERT_EQ(server_->finish().exit_code, 0);
  server_.reset();
  ASSERT_EQ(::rename((control_ + ".kept").c_str(), control_.c_str()), 0);
  const Finished stale = epctl({"status"});
  EXPECT_EQ(stale.exit_code, 3);
  EXPECT_TRUE(stale.complains("left behind")) << stale.err;

  ::unlink(control_.c_str());
  std::ofstream(control_) << "text";
  const Finished file = epctl({"status"});
  EXPECT_EQ(file.exit_code, 3);
  EXPECT_TRUE(file.complains("is no socket")) << file.err;
}

TEST_F(CtlTest, TheAttachSocketIsNotAControlSocket) {
  start_server();
  const Finished wrong = epctl({"--socket", attach_, "status"});
  EXPECT_EQ(wrong.exit_code, 2) << "--socket twice";
  const Finished result = Process({EPCTL_PATH, "--socket", attach_, "status"}).finish();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("is not a control socket")) << result.err;
}

TEST_F(CtlTest, ARefusalKeepsStatusAndMessage) {
  start_server();
  tell_server("fail 12 the supervisor is stopping");
  for (const char* command : {"status", "devices", "sessions", "groups", "ops", "config", "version"}) {
    const Finished text = epctl({command});
    EXPECT_EQ(text.exit_code, 1) << command;
    EXPECT_TRUE(text.complains("epctl: ABORTED: the supervisor is stopping")) << text.err;
  }
  const Finished json = epctl({"status", "--json"});
  EXPECT_EQ(json.exit_code, 1);
  ASSERT_TRUE(json.json().is_object()) << json.out;
  EXPECT_EQ(json.json()["error"]["class"], "refused");
  EXPECT_EQ(json.json()["error"]["status"], "ABORTED");
  EXPECT_EQ(json.json()["error"]["message"], "the supervisor is stopping");
  EXPECT_EQ(json.err, "");
}

TEST_F(CtlTest, ADaemonThatDoesNotAnswerIsUnreachable) {
  start_server();
  tell_server("hang");
  const Finished result = epctl({"--timeout-ms", "200", "status"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("has not answered within 200 ms")) << result.err;
}

TEST_F(CtlTest, TheSocketComesFromTheEnvironmentToo) {
  start_server();
  const std::vector<std::string> environment{"EPD_CONTROL_SOCKET=" + control_};
  const Finished result = Process({EPCTL_PATH, "status"}, environment).finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Finished flag = epctl({"status"}, {"EPD_CONTROL_SOCKET=/nowhere/control.sock"});
  EXPECT_EQ(flag.exit_code, 0) << "the flag counts more: " << flag.err;
}

TEST_F(CtlTest, DrainReturnsWhenItHasBegun) {
  start_server();
  const Finished result = epctl({"drain", "--timeout-ms", "1500"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.says("draining: 2 sessions may finish within 1.5 s")) << result.out;
}

TEST_F(CtlTest, DrainWaitsUntilTheDaemonHasGone) {
  start_server();
  const Finished result = epctl({"drain", "--wait", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  EXPECT_EQ(document["daemon"]["state"], "draining");
  EXPECT_EQ(document["gone"], true);
  EXPECT_NE(::access(control_.c_str(), F_OK), 0);
}

TEST_F(CtlTest, WrongUsageIsExitCode2) {
  const std::vector<std::vector<std::string>> wrong{{},
                                                    {"frobnicate"},
                                                    {"status", "extra"},
                                                    {"--timeout-ms", "0", "status"},
                                                    {"--timeout-ms", "soon", "status"},
                                                    {"drain", "--timeout-ms", "-1"},
                                                    {"status", "--wait"}};
  for (const auto& arguments : wrong) {
    const Finished result = epctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.out << result.err;
    EXPECT_FALSE(result.err.empty());
  }
}

TEST_F(CtlTest, EveryCommandHasHelpWithExamples) {
  const Finished main = epctl({"--help"});
  EXPECT_EQ(main.exit_code, 0);
  EXPECT_TRUE(main.says("EXIT CODES"));
  for (const char* command :
       {"status", "devices", "sessions", "groups", "ops", "config", "drain", "doctor", "version"}) {
    EXPECT_TRUE(main.says(command));
    const Finished help = epctl({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_TRUE(help.says("EXAMPLES") && help.says(std::string("epctl ") + command)) << help.out;
  }
  EXPECT_TRUE(epctl({"--version"}).says("epctl 0.1.0"));
}

std::optional<Json> find_check(const Json& document, const std::string& name) {
  for (const Json& check : document["checks"])
    if (check["name"] == name) return check;
  return std::nullopt;
}

TEST_F(CtlTest, DoctorOfAHealthyDaemonFindsNoFailure) {
  start_server();
  const Finished result = epctl({"doctor", "--json"});
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  for (const char* name : {"control_socket", "daemon", "version", "abi", "state", "configuration",
                           "attach_socket", "device host:0", "device host:1"}) {
    const auto check = find_check(document, name);
    ASSERT_TRUE(check.has_value()) << name;
    EXPECT_EQ((*check)["level"], "ok") << check->dump();
  }
  for (const char* name :
       {"open_files", "locked_memory", "shared_memory", "huge_pages", "memory", "swap", "cores"}) {
    EXPECT_TRUE(find_check(document, name).has_value()) << name;
  }
  EXPECT_EQ(result.exit_code, document["fail"] == 0 ? 0 : 4);
  const Finished text = epctl({"doctor"});
  EXPECT_TRUE(text.says("OK    control_socket")) << text.out;
}

TEST_F(CtlTest, DoctorFindsAnEngineThatHangsAndARefusedReload) {
  start_server();
  tell_server("sick");
  const Finished result = epctl({"doctor", "--json"});
  EXPECT_EQ(result.exit_code, 4);
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  EXPECT_EQ((*find_check(document, "device host:1"))["level"], "fail");
  EXPECT_EQ((*find_check(document, "device host:0"))["level"], "ok");
  EXPECT_EQ((*find_check(document, "configuration"))["level"], "warn");
  const Finished text = epctl({"doctor"});
  EXPECT_EQ(text.exit_code, 4);
  EXPECT_TRUE(text.says("FAIL  device host:1")) << text.out;
  EXPECT_TRUE(text.says("-> its engine (pid 4242) hangs")) << text.out;
}

TEST_F(CtlTest, DoctorWithoutADaemonStillLooksAtTheHost) {
  const Finished result = epctl({"doctor", "--json"}, {"EPD_SOCKET=" + attach_});
  EXPECT_EQ(result.exit_code, 4);
  const Json document = result.json();
  ASSERT_TRUE(document.is_object()) << result.out;
  for (const char* name : {"control_socket", "daemon", "attach_socket"}) {
    const auto check = find_check(document, name);
    ASSERT_TRUE(check.has_value()) << name;
    EXPECT_EQ((*check)["level"], "fail");
    EXPECT_NE((*check)["advice"], "") << "a failure comes with what to do";
  }
  EXPECT_NE((*find_check(document, "attach_socket"))["text"].get<std::string>().find(attach_),
            std::string::npos);
  EXPECT_TRUE(find_check(document, "memory").has_value());
}

}  // namespace
}  // namespace epd::ctl
