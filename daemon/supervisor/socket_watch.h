// Whether the files of the daemon's sockets are still there. Any process that may write in their directory
// can remove them: the daemon continues, and nobody can connect any more.
#pragma once

#include "base/socket_use.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::supervisor {

class SocketWatch {
 public:
  // Both listen. From now on their files are to stay.
  void begin(const std::string& attach_socket, const std::string& control_socket);
  // Must be called in each turn. Polls once a second at most; each change is an event.
  void tick(std::uint64_t now_ns);
  // "" if nothing is wrong.
  const std::string& problem() const { return problem_; }

 private:
  struct Socket {
    std::string path;
    FileId file;
    const char* who;  // can't connect without it
  };

  std::vector<Socket> sockets_;
  std::string problem_;
  std::uint64_t next_look_ns_ = 0;
};

}  // namespace epd::supervisor
