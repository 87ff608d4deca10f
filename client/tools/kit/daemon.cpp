#include "kit/daemon.h"

#include "common/fd.h"
#include "common/signal.h"
#include "kit/error.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

namespace epd::kit {

// ---- command

namespace {

using SteadyClock = std::chrono::steady_clock;

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("making a pipe");
    read_end = UniqueFd(ends[0]);
    write_end = UniqueFd(ends[1]);
  }
  UniqueFd read_end, write_end;
};

pid_t spawn(const std::vector<std::string>& words, const CommandOptions& options, int out, int err) {
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) fail_errno("fork of " + words[0]);
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (::dup2(in, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(err, STDERR_FILENO) < 0)
    ::_exit(126);
  for (const std::string& variable : options.environment) ::putenv(const_cast<char*>(variable.c_str()));
  if (options.in_child) options.in_child();
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

// Reads until both ends are closed, or until `end`. Returns false for `end`.
bool read_both(const Pipe& out, const Pipe& err, SteadyClock::time_point end, CommandResult& result) {
  std::array<pollfd, 2> ends{pollfd{out.read_end.get(), POLLIN, 0}, pollfd{err.read_end.get(), POLLIN, 0}};
  const std::array<std::string*, 2> texts{&result.out, &result.err};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - SteadyClock::now());
    if (left.count() <= 0) return false;
    if (::poll(ends.data(), ends.size(), static_cast<int>(left.count())) <= 0) continue;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char part[4096];
      const ssize_t got = ::read(ends[i].fd, part, sizeof(part));
      if (got > 0) texts[i]->append(part, static_cast<std::size_t>(got));
      if (got == 0 || (got < 0 && errno != EINTR)) ends[i].fd = -1;
    }
  }
  return true;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& words, const CommandOptions& options) {
  CommandResult result;
  Pipe out, err;
  const auto limit =
      std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(options.seconds));
  const auto end = SteadyClock::now() + limit;
  const pid_t pid = spawn(words, options, out.write_end.get(), err.write_end.get());
  out.write_end.reset();
  err.write_end.reset();
  if (!read_both(out, err, end, result)) {
    send_signal(pid, SIGKILL);
    result.err += "(killed after " + std::to_string(options.seconds) + " s)";
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string must_run(const std::vector<std::string>& words, const CommandOptions& options) {
  CommandResult result = run_command(words, options);
  if (result.status == 0) return std::move(result.out);
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + word;
  const std::string said = result.err + result.out;
  fail("'" + line + "' ended with status " + std::to_string(result.status) +
       (said.empty() ? "" : ": " + said.substr(0, said.find_last_not_of('\n') + 1)));
}

bool has_command(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "/usr/bin:/bin");
  for (std::string directory; std::getline(directories, directory, ':');) {
    if (::access((directory + "/" + name).c_str(), X_OK) == 0) return true;
  }
  return false;
}

BackgroundCommand::BackgroundCommand(const std::vector<std::string>& words, const CommandOptions& options) {
  const UniqueFd null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  pid_ = spawn(words, options, null.get(), null.get());
}

BackgroundCommand::~BackgroundCommand() {
  send_signal(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

// ---- daemon

namespace {

namespace fs = std::filesystem;

std::string describe_end(int status) {
  if (WIFSIGNALED(status)) return "the daemon was killed by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) {
    return "the daemon exited with status " + std::to_string(WEXITSTATUS(status));
  }
  return "";
}

// "0, 1, 2"
std::string numbers_below(std::uint32_t count) {
  std::string text;
  for (std::uint32_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(i);
  return text;
}

}  // namespace

std::string make_temporary_directory() {
  const char* base = std::getenv("TMPDIR");
  std::string path = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/epd-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) fail_errno("making a directory like " + path);
  return path;
}

std::string executable_directory() {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  if (error) fail("reading /proc/self/exe: " + error.message());
  return path.parent_path().string();
}

std::string epctl(const std::string& control_socket, const std::vector<std::string>& words) {
  std::vector<std::string> all{executable_directory() + "/epctl", "--socket", control_socket, "--json"};
  all.insert(all.end(), words.begin(), words.end());
  return must_run(all);
}

OwnDaemon::OwnDaemon(const DaemonOptions& options) : socket_(options.socket) {
  if (!socket_.empty()) return;
  const std::string program = options.program.empty() ? executable_directory() + "/epd" : options.program;
  if (::access(program.c_str(), X_OK) != 0) {
    fail("no daemon to start at '" + program + "': give its path with --epd, or --socket of one that runs");
  }
  directory_ = make_temporary_directory();
  socket_ = directory_ + "/epd.sock";
  write_config(options);
  spawn(program, options.in_child);
}

OwnDaemon::~OwnDaemon() {
  stop();
}

void OwnDaemon::write_config(const DaemonOptions& options) const {
  std::ofstream file(directory_ + "/epd.toml");
  file << "[daemon]\nsocket = \"" << socket_ << "\"\ncontrol_socket = \"" << control_socket() << "\"\n"
       << "[devices]\nhost = " << options.host_devices << "\ncuda = [" << numbers_below(options.cuda_devices)
       << "]\n";
  if (options.sms != 0) file << "sms = " << options.sms << "\n";
  if (options.linger_us != 0) file << "linger_us = " << options.linger_us << "\n";
  file << options.settings;
  if (!file.flush()) fail("writing " + directory_ + "/epd.toml failed");
}

void OwnDaemon::spawn(const std::string& program, const std::function<void()>& in_child) {
  const std::string config = directory_ + "/epd.toml";
  const std::string log = directory_ + "/epd.log";
  const std::string control = control_socket();
  // The sockets are given as flags too, because $EPD_SOCKET and $EPD_CONTROL_SOCKET would win over the file.
  const char* arguments[] = {program.c_str(),    "serve",         "--config",
                             config.c_str(),     "--socket",      socket_.c_str(),
                             "--control-socket", control.c_str(), nullptr};
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) fail_errno("fork of the daemon");
  if (pid_ > 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(126);
  const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (out < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(out, STDERR_FILENO) < 0) ::_exit(126);
  if (in_child) in_child();
  ::execv(program.c_str(), const_cast<char**>(arguments));
  ::_exit(127);
}

std::string OwnDaemon::log_tail(const std::string& whose) const {
  std::ifstream file(directory_ + "/epd.log");
  std::ostringstream text;
  if (pid_ > 0) text << file.rdbuf();
  constexpr std::size_t kTail = 2000;
  const std::string all = text.str();
  if (all.empty()) return "";
  return "\nthe end of the log of " + whose + ":\n" + all.substr(all.size() - std::min(all.size(), kTail));
}

std::string OwnDaemon::stop() {
  if (pid_ <= 0) return "";
  send_signal(pid_, SIGTERM);
  std::string outcome;
  int status = 0;
  bool ended = false;
  for (int i = 0; i < 3000 && !ended; ++i) {
    ended = ::waitpid(pid_, &status, WNOHANG) == pid_;
    if (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (ended) {
    outcome = describe_end(status);
  } else {
    send_signal(pid_, SIGKILL);
    ::waitpid(pid_, &status, 0);
    outcome = "the daemon did not stop within 30 s of SIGTERM";
  }
  if (!outcome.empty()) outcome += log_tail();
  pid_ = -1;
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
  return outcome;
}

}  // namespace epd::kit
