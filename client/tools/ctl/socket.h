// Facts about a unix socket, and about the process that listens there, which can be found without a call.
#pragma once

#include "common/fd.h"

#include <sys/types.h>
#include <chrono>
#include <cstdint>
#include <string>

namespace epd::ctl {

struct SocketFile {
  enum class Kind {
    kMissing,    // or a directory on the way is
    kUnseen,     // a directory on the way may not be entered; `error` says so
    kOther,      // something that is no socket
    kForbidden,  // this process may not connect
    kStale,      // nobody listens; only where it was looked for
    kUsable,
  };
  Kind kind = Kind::kMissing;
  mode_t mode = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::string error;
};

SocketFile look_at_socket(const std::string& path);

// The result of a try to connect.
struct Knock {
  int error = 0;       // an errno; EAGAIN: the listener's queue is full
  pid_t listener = 0;  // 0: not seen from here
};
Knock knock(const std::string& path);
// Whether a daemon has left the socket behind. Makes no connection to the attach socket.
bool is_stale(const std::string& path);

std::string user_name(std::uint32_t uid);  // its number if it has none
// "root:epd 0660"
std::string owner_and_mode(const SocketFile& file);
// Advice for a person without permission: "join group epd, or use sudo". Nobody is told to join group root.
std::string how_to_get_in(const SocketFile& file, const std::string& keys);

// Whether a process is stopped by a signal or a debugger.
bool is_stopped(pid_t pid);
// The process that listens at `path`, as a pidfd. `own_pid` is the process's number in its own namespace, as
// it tells it. Invalid if another process listens, or if it can't be seen from here.
UniqueFd listening_process(const std::string& path, std::int32_t own_pid);
// Waits until the process of a pidfd has ended. Returns false at the deadline.
bool wait_for_exit(const UniqueFd& process, std::chrono::steady_clock::time_point deadline);

}  // namespace epd::ctl
