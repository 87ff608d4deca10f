// What epctl can find out about a unix socket's file before it connects.
#pragma once

#include <sys/types.h>
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

// Whether a daemon has left it behind. Makes no connection to the attach socket.
bool is_stale(const std::string& path);
std::string user_name(std::uint32_t uid);  // its number if it has none
// "root:epd 0660"
std::string owner_and_mode(const SocketFile& file);
// What a person without permission can do: "join group epd, or use sudo". Nobody is told to join group root.
std::string how_to_get_in(const SocketFile& file, const std::string& keys);

}  // namespace epd::ctl
