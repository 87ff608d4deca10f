// The file of the control socket: what may be there before listening, and who may open it.
#pragma once

#include "common/fd.h"
#include "common/status.h"
#include "control/control_server.h"

#include <string>

namespace epd::control {

// Checks that the path is short enough for a socket address, and has no character that gRPC's addresses treat
// specially.
Status check_socket_options(const ControlOptions& options);

// Makes the directory if there is none, and removes a stale socket. ABORTED: a process listens on it.
// INVALID_ARGUMENT: not a socket, or the directory can't be made.
Status clear_socket_path(const std::string& path);

// Binds and listens. Only the owner may open the file until it has its group, and then its mode.
Result<UniqueFd> listen_on(const ControlOptions& options);

}  // namespace epd::control
