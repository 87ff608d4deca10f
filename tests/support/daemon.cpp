#include "support/daemon.h"

#include "common/signal.h"
#include "support/census.h"
#include "support/client.h"
#include "support/cuda_memory.h"
#include "support/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

// Reads both ends until they close or time is up.
void collect(int out, int err, double end, CommandResult& result) {
  pollfd entries[2] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* texts[2] = {&result.out, &result.err};
  while ((entries[0].fd >= 0 || entries[1].fd >= 0) && now_s() < end) {
    if (::poll(entries, 2, 100) <= 0) continue;
    for (int i = 0; i < 2; ++i) {
      if (entries[i].fd < 0 || entries[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t n = ::read(entries[i].fd, buffer, sizeof(buffer));
      if (n > 0) {
        texts[i]->append(buffer, static_cast<std::size_t>(n));
      } else if (n == 0 || errno != EINTR) {
        entries[i].fd = -1;
      }
    }
  }
}

int wait_for(pid_t pid, double end, bool* ended) {
  int status = 0;
  *ended = eventually(std::max(0.0, end - now_s()), [&] { return ::waitpid(pid, &status, WNOHANG) == pid; });
  return status;
}

std::string tail(const std::string& text, std::size_t bytes) {
  return text.size() <= bytes ? text : "..." + text.substr(text.size() - bytes);
}

}  // namespace

namespace {

// "0, 1, 2"
std::string numbers_below(std::uint32_t count) {
  std::string text;
  for (std::uint32_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(i);
  return text;
}

std::string program(const char* built, const char* name) {
  const char* folder = std::getenv("EPD_TEST_BIN");
  return folder == nullptr ? built : std::string(folder) + "/" + name;
}

}  // namespace

std::string daemon_program() {
  return program(EPD_TEST_DAEMON, "epd");
}

std::string epctl_program() {
  return program(EPD_TEST_EPCTL, "epctl");
}

void use_devices(DaemonOptions& options, const std::string& kind) {
  if (kind == "host") return;
  options.prefix = "cuda";
  options.sms = 32;
  const char* gpus = std::getenv("EPD_TEST_GPUS");
  if (gpus != nullptr) options.devices = static_cast<std::uint32_t>(std::strtoul(gpus, nullptr, 10));
}

bool can_use_devices(const std::string& kind) {
  return kind == "host" || has_cuda_driver();
}

CommandResult run_command(const std::vector<std::string>& arguments, double seconds,
                          const std::vector<std::string>& environment) {
  CommandResult result;
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0) return result;
  if (::pipe2(err, O_CLOEXEC) != 0) return result;
  const double start = now_s();
  const std::vector<char*> argv = pointers(arguments);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    for (const std::string& variable : environment) ::putenv(const_cast<char*>(variable.c_str()));
    ::execvp(argv[0], argv.data());
    std::perror(argv[0]);
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  collect(out[0], err[0], start + seconds, result);
  ::close(out[0]);
  ::close(err[0]);
  bool ended = false;
  int status = wait_for(pid, start + seconds, &ended);
  if (!ended) {
    send_signal(pid, SIGKILL);
    ::waitpid(pid, &status, 0);
    result.err += "\n[killed after " + std::to_string(seconds) + " s]";
  }
  result.seconds = now_s() - start;
  if (ended && WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

Daemon::Daemon(DaemonOptions options) : options_(std::move(options)), directory_(options_.directory) {
  // Engines whose supervisor was killed become our children, so that we see whether they end.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (directory_.empty()) {
    std::string pattern = (fs::temp_directory_path() / "epd-test-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    own_directory_ = true;
  }
  socket_ = directory_ + "/epd.sock";
  control_ = directory_ + "/control.sock";
  log_path_ = directory_ + "/epd.log";
}

Daemon::~Daemon() {
  const std::vector<pid_t> engine_pids = engines();
  if (pid_ > 0) {
    send_signal(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    // They follow it by themselves; a test that is about to end in failure does not rely on that.
    eventually(2, [&] { return std::none_of(engine_pids.begin(), engine_pids.end(), is_running); });
    for (const pid_t engine : engine_pids)
      if (is_running(engine)) send_signal(engine, SIGKILL);
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
  }
  check_log();
  if (!testing::UnitTest::GetInstance()->Passed())
    std::fprintf(stderr, "---- log of the daemon\n%s----\n", tail(log(), 16000).c_str());
  std::error_code ignored;
  if (own_directory_) fs::remove_all(directory_, ignored);
}

void Daemon::write_config() const {
  std::ofstream out(directory_ + "/epd.toml");
  out << "daemon.socket = \"" << socket_ << "\"\n"
      << "daemon.control_socket = \"" << control_ << "\"\n";
  if (options_.device_lines) {
    out << *options_.device_lines;
  } else {
    const bool cuda = options_.prefix == "cuda";
    out << "devices.host = " << (cuda ? 0 : options_.devices) << "\n"
        << "devices.cuda = [" << (cuda ? numbers_below(options_.devices) : "") << "]\n"
        << "devices.sms = " << options_.sms << "\n";
  }
  for (const auto& [key, value] : options_.settings) out << key << " = " << value << "\n";
}

void Daemon::rewrite(const std::vector<std::pair<std::string, std::string>>& settings) {
  for (const auto& setting : settings) {
    std::erase_if(options_.settings, [&](const auto& old) { return old.first == setting.first; });
    options_.settings.push_back(setting);
  }
  write_config();
}

void Daemon::rewrite_sms(std::uint32_t sms) {
  options_.sms = sms;
  write_config();
}

bool Daemon::spawn() {
  const std::vector<std::string> arguments = {daemon_program(), "serve", "--config",
                                              directory_ + "/epd.toml"};
  const std::vector<char*> argv = pointers(arguments);
  const int log_fd = options_.log_fd >= 0
                         ? ::fcntl(options_.log_fd, F_DUPFD_CLOEXEC, 0)
                         : ::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log_fd < 0) return false;
  std::fflush(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(log_fd, STDOUT_FILENO);
    ::dup2(log_fd, STDERR_FILENO);
    const rlimit descriptors{options_.max_descriptors, options_.max_descriptors};
    if (options_.max_descriptors != 0 && ::setrlimit(RLIMIT_NOFILE, &descriptors) != 0) ::_exit(126);
    if (options_.in_child != nullptr) options_.in_child();
    ::execv(argv[0], argv.data());
    std::perror(argv[0]);
    ::_exit(127);
  }
  ::close(log_fd);
  return pid_ > 0;
}

bool Daemon::start_among_clients() {
  write_config();
  if (!spawn()) {
    ADD_FAILURE() << "can't start " << daemon_program();
    return false;
  }
  return wait_ready();
}

bool Daemon::start() {
  if (!start_among_clients()) return false;
  const bool alone = eventually(20, [&] { return serves_nobody(); });
  EXPECT_TRUE(alone) << "a session or a group is left by which devices were asked";
  return alone;
}

bool Daemon::kill_and_respawn() {
  signal(SIGKILL);
  return wait_exit(10) != -1 && spawn();
}

bool Daemon::wait_ready() {
  std::string why = "no socket " + socket_;
  const bool ready = eventually(20, [&] {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      why = "it ended with status " + std::to_string(status);
      return true;
    }
    if (options_.device_lines) return log().find("event=\"serving\"") != std::string::npos;
    return fs::exists(socket_) && all_devices_answer(socket_, options_.prefix, options_.devices, &why);
  });
  if (!ready || pid_ < 0) {
    ADD_FAILURE() << "the daemon does not serve: " << why;
    return false;
  }
  return true;
}

int Daemon::wait_exit(double seconds) {
  if (pid_ <= 0) return -1;
  bool ended = false;
  const int status = wait_for(pid_, now_s() + seconds, &ended);
  if (!ended) return -1;
  pid_ = -1;
  return status;
}

void Daemon::signal(int number) const {
  if (pid_ > 0) send_signal(pid_, number);
}

void Daemon::stop() {
  ASSERT_GT(pid_, 0) << "not running";
  const std::vector<pid_t> engine_pids = engines();
  signal(SIGTERM);
  const int status = wait_exit(20);
  ASSERT_NE(status, -1) << "no exit 20 s after SIGTERM";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  for (const pid_t engine : engine_pids)
    EXPECT_TRUE(eventually(5, [&] { return !is_running(engine); })) << "engine " << engine << " is left";
  EXPECT_FALSE(fs::exists(socket_)) << "the socket is left";
}

void Daemon::check_log() const {
  const std::string text = log();
  for (const char* bad :
       {"AddressSanitizer", "ThreadSanitizer", "LeakSanitizer", "runtime error:", "check failed"})
    EXPECT_EQ(text.find(bad), std::string::npos) << bad << " in the daemon's log";
}

bool Daemon::running() const {
  return pid_ > 0 && is_running(pid_);
}

std::vector<pid_t> Daemon::engines() const {
  return pid_ > 0 ? children_of(pid_) : std::vector<pid_t>{};
}

pid_t Daemon::engine(std::uint32_t device) const {
  // Each engine has its device on its command line.
  const std::string name = options_.prefix + ":" + std::to_string(device);
  for (const pid_t pid : engines()) {
    std::ifstream in("/proc/" + std::to_string(pid) + "/cmdline");
    std::string line(4096, '\0');
    // Throws nothing if the process ends meanwhile, as an iterator of the stream's buffer would.
    in.read(line.data(), static_cast<std::streamsize>(line.size()));
    line.resize(static_cast<std::size_t>(in.gcount()));
    if (line.find(name) != std::string::npos) return pid;
  }
  return -1;
}

std::vector<pid_t> Daemon::engine_of_each_device() const {
  std::vector<pid_t> pids;
  for (std::uint32_t device = 0; device < devices(); ++device) pids.push_back(engine(device));
  return pids;
}

bool Daemon::serves_nobody() const {
  const std::vector<pid_t> pids = all_pids();
  return std::none_of(pids.begin(), pids.end(), [](pid_t pid) {
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    for (std::string line; std::getline(maps, line);) {
      for (const char* name : {"/memfd:epd-segment-", "/memfd:epd-board"})
        if (line.find(name) != std::string::npos) return true;
    }
    return false;
  });
}

std::vector<pid_t> Daemon::all_pids() const {
  std::vector<pid_t> pids = engines();
  if (pid_ > 0) pids.insert(pids.begin(), pid_);
  return pids;
}

std::string Daemon::log() const {
  std::ifstream in(log_path_);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

CommandResult Daemon::epctl(std::vector<std::string> arguments, double seconds) const {
  // A busy machine may need longer than epctl's own 2 s, which would prove nothing.
  arguments.insert(arguments.begin(), {epctl_program(), "--socket", control_, "--timeout-ms", "20000"});
  return run_command(arguments, seconds);
}

}  // namespace epd::test
