// Programs that a tool runs, and the daemon that it starts for itself.
#pragma once

#include <sys/types.h>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace epd::kit {

struct CommandOptions {
  double seconds = 60;                     // limit, after which the program is killed
  std::vector<std::string> environment{};  // "NAME=VALUE", in addition to this process's
  std::function<void()> in_child{};        // called in the child before exec
};

struct CommandResult {
  int status = -1;  // like the shell's: 127: not found; 128 + the signal's number
  std::string out;
  std::string err;
};

// words[0] is looked for in PATH.
CommandResult run_command(const std::vector<std::string>& words, const CommandOptions& options = {});
// Returns the program's standard output. Throws ToolError with its output unless it ended with status 0.
std::string must_run(const std::vector<std::string>& words, const CommandOptions& options = {});
// Whether a directory of PATH has the program.
bool has_command(const std::string& name);

// Runs until the destructor kills it. Its output is discarded.
class BackgroundCommand {
 public:
  explicit BackgroundCommand(const std::vector<std::string>& words, const CommandOptions& options = {});
  ~BackgroundCommand();
  BackgroundCommand(const BackgroundCommand&) = delete;
  BackgroundCommand& operator=(const BackgroundCommand&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

// A daemon of the tool's own: `epd serve` in a temporary directory.
struct DaemonOptions {
  std::string socket{};              // a daemon that runs already; empty: one is started
  std::string program;               // path of epd; empty: beside this executable
  std::uint32_t host_devices = 1;    // host:0 and up
  std::uint32_t cuda_devices = 0;    // cuda:0 and up
  std::uint32_t sms = 0;             // SMs of each device (host: worker threads); 0: the daemon's default
  std::uint32_t linger_us = 0;       // how long a GPU's SMs stay after an operation
  std::string settings{};            // further lines of its configuration: "[cluster]\n..."
  std::function<void()> in_child{};  // called in the child before exec
};

// The constructor starts the daemon, stop() or the destructor stops it. It dies with this process. A daemon
// that runs already is left alone.
class OwnDaemon {
 public:
  explicit OwnDaemon(const DaemonOptions& options);  // throws ToolError
  ~OwnDaemon();
  OwnDaemon(const OwnDaemon&) = delete;
  OwnDaemon& operator=(const OwnDaemon&) = delete;

  const std::string& socket() const { return socket_; }
  std::string control_socket() const { return directory_ + "/control.sock"; }
  pid_t pid() const { return pid_; }  // -1: started by somebody else
  // The last lines of its output, with a heading; "" if there are none. `whose`: "the daemon".
  std::string log_tail(const std::string& whose = "the daemon") const;
  // Sends SIGTERM, then SIGKILL after ten seconds. Returns "" after a clean exit, else what happened
  // and the end of its log.
  std::string stop();

 private:
  void write_config(const DaemonOptions& options) const;
  void spawn(const std::string& program, const std::function<void()>& in_child);

  std::string directory_;
  std::string socket_;
  pid_t pid_ = -1;
};

// Makes an empty directory in $TMPDIR or /tmp.
std::string make_temporary_directory();
// The directory of this executable, without a slash at the end.
std::string executable_directory();
// Runs the epctl beside this program with --json and returns its output. Throws ToolError if it fails.
std::string epctl(const std::string& control_socket, const std::vector<std::string>& words);

}  // namespace epd::kit
