// Starts a daemon if need be, and runs ranks.
#pragma once

#include "kit/daemon.h"
#include "plan.h"
#include "samples.h"

#include <memory>
#include <optional>
#include <string>

namespace epd::bench {

// The daemon for this process: its own, or one that runs already.
class Daemon {
 public:
  struct Devices {
    std::uint32_t host = 0;
    std::uint32_t cuda = 0;
    std::uint32_t sms = 0;
    std::uint32_t linger_us = 0;
  };
  Daemon(const DaemonPlan& plan, const Devices& devices);
  const std::string& socket() const { return own_ ? own_->socket() : socket_; }
  pid_t pid() const { return own_ ? own_->pid() : -1; }  // -1: not ours
  // Throws kit::ToolError if our own did not stop cleanly.
  void stop();
  // The end of our own daemon's log for error messages, or "".
  std::string log() const;

 private:
  std::string socket_;
  std::optional<kit::OwnDaemon> own_;
};

// One run with fresh rank processes, and what they measured. Throws kit::ToolError if it did not finish. This
// process must have one thread. `label`: for the progress line, shown on a terminal only.
std::unique_ptr<Samples> run_ranks(const RunPlan& plan, const Daemon& daemon, const std::string& label);

}  // namespace epd::bench
