// The control socket's file: what may lie there before listening, and who may open it afterwards.
#pragma once

#include "base/status.h"
#include "control/control_server.h"

#include <sys/types.h>
#include <optional>
#include <string>

namespace epd {

// Path short enough for a socket address and free of characters that gRPC's addresses give a meaning.
Status check_socket_options(const ControlOptions& options);

// No value if `group` is empty.
Result<std::optional<gid_t>> find_group(const std::string& group);

// Removes a stale socket. ABORTED if somebody listens, INVALID_ARGUMENT if it is no socket.
Status clear_socket_path(const std::string& path);

// Group first, then mode, so that nobody of the wrong group can open it in between.
Status restrict_socket(const ControlOptions& options, std::optional<gid_t> group);

// While it lives, new files are the owner's only. Process-wide.
class PrivateUmask {
 public:
  PrivateUmask();
  ~PrivateUmask();
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  mode_t previous_;
};

}  // namespace epd
