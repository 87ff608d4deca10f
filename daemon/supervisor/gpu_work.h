// Ends the work of a process on GPUs under MPS, before the process is cut off. See "GPUs under MPS" in the
// README.
#pragma once

#include "mps.h"
#include "rooms.h"
#include "session/session_table.h"

#include <sys/types.h>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace epd::supervisor {

class GpuWork {
 public:
  explicit GpuWork(const Rooms& rooms) : rooms_(rooms) {}

  Status start();
  // Called when engines are on their GPUs: finds out whether MPS can be asked.
  void probe();
  // Why MPS can't be asked; empty: it can, or it is not needed.
  const std::string& error() const { return error_; }

  // FleetHost::before_kill
  void before_kill(std::uint32_t device, std::function<void()> then);
  // Ends a session because the operator wants that.
  void expel(const session::Session& session, const Status& status);
  // The session ends: MPS must not be asked about it any more.
  void session_closed(std::uint64_t session_id);

 private:
  std::vector<pid_t> engine_pids() const;
  void terminate(std::uint32_t device, pid_t pid, int pidfd, std::shared_ptr<const std::atomic<bool>> left,
                 std::function<void()> then);

  const Rooms& rooms_;
  std::unique_ptr<MpsControl> mps_;  // null: there is no MPS
  std::string error_;
  // Sessions of clients whose work MPS is asked to terminate. The flag is set when the session ends before
  // MPS has done so.
  std::map<std::uint64_t, std::shared_ptr<std::atomic<bool>>> expelled_;
};

}  // namespace epd::supervisor
