// The attach socket in the file system.
#pragma once

#include "common/fd.h"
#include "common/status.h"

#include <sys/types.h>
#include <optional>
#include <string>

namespace epd {

struct ListenerOptions {
  std::string path;
  mode_t mode = 0660;
  std::optional<gid_t> group;  // owner group of the socket; none: the process's
};

// A listening SOCK_SEQPACKET socket. Beside it lies "<path>.lock", held locked for as long as the
// daemon lives: it tells a living daemon's socket (refused: RESOURCE_EXHAUSTED naming its pid) from a dead
// one's (removed). The directory is made if it is missing. remove() or the destructor removes the socket
// file.
class Listener {
 public:
  Listener() = default;
  static Result<Listener> open(const ListenerOptions& options);
  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener() { remove(); }

  // For the gate, which accepts.
  UniqueFd take_socket() { return std::move(socket_); }
  const std::string& path() const { return path_; }
  // Nobody finds the socket any more, and another daemon may serve its path.
  void remove();

 private:
  UniqueFd socket_;
  UniqueFd lock_;
  std::string path_;
};

}  // namespace epd
