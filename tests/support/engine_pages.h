// Each engine's page, read the way the supervisor does; and engines killed in a state that their page shows.
#pragma once

#include "common/memory.h"
#include "proto/link.h"
#include "support/daemon.h"

#include <functional>
#include <vector>

namespace epd::test {

class EnginePages {
 public:
  // Every engine must run; the pages outlive them.
  explicit EnginePages(const Daemon& daemon);

  const abi::EnginePage& of(std::uint32_t device) const { return *pages_[device].as<abi::EnginePage>(); }
  // Some operation of this kind is in this stage.
  bool shows(std::uint32_t device, abi::Op op, abi::OpStage stage) const;

 private:
  std::vector<Mapping> pages_;
};

// SIGSTOP, and waits until it has stopped. False if it has not.
bool stop_process(pid_t pid);
// Stops a process in a moment when `state` holds, and looks at it again after the stop; lets the process
// continue and tries again otherwise. False if no such moment comes before `over` holds, or in `seconds`.
bool stop_when(pid_t pid, const std::function<bool()>& state, const std::function<bool()>& over,
               double seconds = 30);

}  // namespace epd::test
