// A daemon of the test's own, in a directory of its own, and the commands that talk to it.
#pragma once

#include <sys/types.h>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

struct CommandResult {
  int exit_code = -1;  // -1: ended by a signal or the time limit
  std::string out;     // standard output
  std::string err;     // standard error
  double seconds = 0;
};
CommandResult run_command(const std::vector<std::string>& arguments, double seconds = 30,
                          const std::vector<std::string>& environment = {});

// Where the build put them, or in the folder that EPD_TEST_BIN names.
std::string daemon_program();
std::string epctl_program();

struct DaemonOptions {
  std::uint32_t devices = 4;
  std::string prefix = "host";  // of the devices' names
  std::uint32_t sms = 2;
  // In place of all that: the configuration's lines about devices.
  std::optional<std::string> device_lines;
  // Further lines of the configuration: {"limits.max_sessions", "3"}; values in TOML's notation.
  std::vector<std::pair<std::string, std::string>> settings;
  std::string directory;              // "" = a new one; a given one is used as it is and kept
  std::uint32_t max_descriptors = 0;  // its RLIMIT_NOFILE; 0 = as here
  std::function<void()> in_child{};   // called before it is executed, in its process
  int log_fd = -1;                    // in place of a file: what it logs to; the caller's
};

// For devices of that kind, "host" or "cuda": as many GPUs as EPD_TEST_GPUS says, on which each rank has an
// SM.
void use_devices(DaemonOptions& options, const std::string& kind);
// Whether a test of that kind of device can run here.
bool can_use_devices(const std::string& kind);

class Daemon {
 public:
  explicit Daemon(DaemonOptions options = {});
  ~Daemon();  // kills what is left; sanitizers must be silent in the log; prints it if the test failed
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Starts it and waits until every device answers. A test failure (and false) if it doesn't.
  bool start();
  // The same while clients wait for it, which attach at once: it is not seen to serve nobody first.
  bool start_among_clients();
  // kill -9, and a new one in its place before anything else can happen. wait_ready() is the caller's.
  bool kill_and_respawn();
  // Until every device answers; as start().
  bool wait_ready();
  // SIGTERM; a test failure unless it exits with 0, leaves no engine and no socket behind.
  void stop();
  void signal(int number) const;
  // Waits for the exit; the status as waitpid gives it, or -1 after `seconds`.
  int wait_exit(double seconds);
  // Writes the configuration again, with these settings beside the old ones (SIGHUP is the caller's).
  void rewrite(const std::vector<std::pair<std::string, std::string>>& settings);
  void rewrite_sms(std::uint32_t sms);

  bool running() const;
  pid_t pid() const { return pid_; }
  std::vector<pid_t> engines() const;        // and other children, which do not last
  pid_t engine(std::uint32_t device) const;  // -1 if none runs
  std::vector<pid_t> engine_of_each_device() const;
  std::vector<pid_t> all_pids() const;
  // Whether nothing of any session or group is left: the supervisor and the engine of a session map its
  // segments, and those of a group its boards. Both go a little after their clients.
  bool serves_nobody() const;
  const std::string& directory() const { return directory_; }
  const std::string& socket() const { return socket_; }
  const std::string& control() const { return control_; }
  std::string log() const;
  std::uint32_t devices() const { return options_.devices; }
  std::string device(std::uint32_t rank) const {
    return options_.prefix + ":" + std::to_string(rank % options_.devices);
  }
  CommandResult epctl(std::vector<std::string> arguments, double seconds = 30) const;

 private:
  void write_config() const;
  bool spawn();
  void check_log() const;

  DaemonOptions options_;
  std::string directory_, socket_, control_, log_path_;
  pid_t pid_ = -1;
  bool own_directory_ = false;
};

}  // namespace epd::test
