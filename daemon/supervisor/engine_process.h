// One running engine: its process, its link, and the messages that wait for room in the link.
#pragma once

#include "base/log.h"
#include "common/packet.h"
#include "device/device.h"
#include "proto/link.h"
#include "transport/network.h"

#include <sys/types.h>
#include <deque>
#include <memory>
#include <optional>
#include <string>

namespace epd::supervisor {

struct EngineCommand {
  std::string binary;  // "/proc/self/exe"
  std::string device;  // "host:0"
  int page_fd = -1;    // becomes descriptor 4 of the engine
  int bell_fd = -1;    // becomes descriptor 5
  LogLevels log_levels;
  LogFormat log_format = LogFormat::kLogfmt;
  transport::NetworkOptions network;
};

class EngineProcess {
 public:
  // Forks and executes. RESOURCE_EXHAUSTED: not possible now, for lack of descriptors, processes or memory.
  // The engine dies with the calling thread, so that thread must live as long as the daemon.
  static Result<std::unique_ptr<EngineProcess>> spawn(const EngineCommand& command);
  EngineProcess(const EngineProcess&) = delete;
  // Kills the engine if it still runs, and waits for its end.
  ~EngineProcess();

  pid_t pid() const { return pid_; }
  int link_fd() const { return link_.get(); }
  int pidfd() const { return pidfd_.get(); }

  // Sends the message at once, or keeps it (with duplicates of the descriptors) until flush() finds room. An
  // error means that the link is broken.
  template <typename T>
  Status send(abi::LinkType type, const T& body, const FdList& fds = {}) {
    return send_bytes(static_cast<std::uint16_t>(type), &body, sizeof(body), fds);
  }
  Status send_stop() { return send_bytes(static_cast<std::uint16_t>(abi::LinkType::kStop), nullptr, 0, {}); }
  bool has_queued() const { return !queue_.empty(); }
  std::uint64_t queued_descriptors() const { return queued_descriptors_; }
  Status flush();

  void kill();
  // Whether the engine has closed its link. It does so when nothing of it runs any more, and then its process
  // ends.
  bool has_left() const;
  // Called after pidfd() has become readable. Returns "exit 1" or "signal 9", for example, or nothing while
  // threads of the process have not ended. It waits neither for them nor for the kernel, which may take
  // seconds to release a process: another thread waits for that.
  std::optional<std::string> reap();
  // Valid after reap() has returned an end. -1: a signal ended it.
  int exit_code() const { return exit_code_; }

 private:
  struct Queued {
    std::uint16_t type;
    std::vector<std::byte> body;
    std::vector<UniqueFd> fds;
  };
  EngineProcess() = default;
  Status send_bytes(std::uint16_t type, const void* body, std::size_t bytes, const FdList& fds);

  pid_t pid_ = -1;
  bool reaped_ = false;
  int exit_code_ = -1;
  UniqueFd link_;
  UniqueFd pidfd_;
  std::deque<Queued> queue_;
  std::uint64_t queued_descriptors_ = 0;
};

}  // namespace epd::supervisor
