// The attach socket in the file system.
#pragma once

#include "base/socket_use.h"
#include "common/fd.h"
#include "common/status.h"

#include <sys/types.h>
#include <optional>
#include <string>
#include <utility>

namespace epd::session {

struct ListenerOptions {
  std::string path;
  mode_t mode = 0660;
  std::optional<gid_t> group;  // owner group of the socket; none: the process's
};

// A listening SOCK_SEQPACKET socket. The file "<path>.lock" beside it stays locked while the daemon lives. So
// a living daemon's socket (refused: RESOURCE_EXHAUSTED with its pid) differs from a dead one's (removed). A
// socket at which any other process listens is also refused. A missing directory is made. remove() or the
// destructor removes the lock's file, and the socket file if it is still this one.
class Listener {
 public:
  Listener() = default;
  static Result<Listener> open(const ListenerOptions& options);
  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener() { remove(); }

  // For the gate, which accepts on it.
  UniqueFd take_socket() { return std::move(socket_); }
  const std::string& path() const { return path_; }
  // After this no client finds the socket, and another daemon may use its path.
  void remove();

 private:
  UniqueFd socket_;
  UniqueFd lock_;
  std::string path_;
  FileId file_;  // of the path
};

}  // namespace epd::session
