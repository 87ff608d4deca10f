// Starts a daemon if need be, runs ranks, and makes reports.
#pragma once

#include "kit/daemon.h"
#include "plan.h"
#include "report.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

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

// Room for what the ranks of such a run measure.
std::unique_ptr<Samples> make_samples(const RunPlan& plan);

// One run with fresh rank processes. Throws kit::ToolError if it did not finish. This process must have one
// thread. `label`: for the progress line, shown on a terminal only.
void run_ranks(const RunPlan& plan, const Daemon& daemon, const std::string& label, Samples& samples);

// The same, and its reports.
std::vector<Report> run_ranks(const RunPlan& plan, const Daemon& daemon, const std::string& label);

}  // namespace epd::bench
