// How work on GPUs is ended under MPS, before its process is cut off. See README, "GPUs under MPS".
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
  // When engines are on their GPUs: whether MPS could be asked.
  void probe();
  // Why MPS can't be asked; empty: it can, or need not.
  const std::string& error() const { return error_; }

  // FleetHost::before_kill
  void before_kill(std::uint32_t device, std::function<void()> then);
  // Ends a session because the operator wants it gone.
  void expel(const session::Session& session, const Status& status);
  // It ends: MPS must not be asked for it any more.
  void session_closed(std::uint64_t session_id);

 private:
  std::vector<pid_t> engine_pids() const;
  void terminate(std::uint32_t device, pid_t pid, int pidfd, std::shared_ptr<const std::atomic<bool>> left,
                 std::function<void()> then);

  const Rooms& rooms_;
  std::unique_ptr<MpsControl> mps_;  // null: nobody to ask
  std::string error_;
  // Sessions whose clients' work MPS is asked to terminate; set when they end before it has.
  std::map<std::uint64_t, std::shared_ptr<std::atomic<bool>>> expelled_;
};

}  // namespace epd::supervisor
