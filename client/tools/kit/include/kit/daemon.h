// A daemon of the tool's own: `epd serve` in a temporary directory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace epd::kit {

struct DaemonOptions {
  std::string socket{};              // of a daemon that runs already; empty: one is started
  std::string program;               // path of epd; empty: beside this executable
  std::uint32_t host_devices = 1;    // host:0 and up
  std::uint32_t cuda_devices = 0;    // cuda:0 and up
  std::uint32_t sms = 0;             // of each (host: worker threads); 0: the daemon's default
  std::uint32_t linger_us = 0;       // of GPUs: how long their SMs stay after an operation
  std::string settings{};            // further lines of its configuration: "[cluster]\n..."
  std::function<void()> in_child{};  // called before it is executed, in its process
};

// Started by the constructor, stopped by stop() or the destructor. Dies with this process. One that runs
// already is left alone.
class OwnDaemon {
 public:
  explicit OwnDaemon(const DaemonOptions& options);  // throws ToolError
  ~OwnDaemon();
  OwnDaemon(const OwnDaemon&) = delete;
  OwnDaemon& operator=(const OwnDaemon&) = delete;

  const std::string& socket() const { return socket_; }
  std::string control_socket() const { return directory_ + "/control.sock"; }
  pid_t pid() const { return pid_; }  // -1: not ours
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

// An empty one, in $TMPDIR or /tmp.
std::string make_temporary_directory();
// The directory of this executable, without a slash at the end.
std::string executable_directory();
// What epctl, which lies beside this program, prints with --json. Throws ToolError if it fails.
std::string epctl(const std::string& control_socket, const std::vector<std::string>& words);

}  // namespace epd::kit
