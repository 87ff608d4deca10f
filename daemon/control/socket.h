// The control socket's file: what may lie there before listening, and who may open it afterwards.
#pragma once

#include "common/fd.h"
#include "common/status.h"
#include "control/control_server.h"

#include <string>

namespace epd {

// Path short enough for a socket address and free of characters that gRPC's addresses give a meaning.
Status check_socket_options(const ControlOptions& options);

// Removes a stale socket. ABORTED if somebody listens, INVALID_ARGUMENT if it is no socket.
Status clear_socket_path(const std::string& path);

// Binds and listens. The file is its owner's alone until it has its group, and then its mode.
Result<UniqueFd> listen_on(const ControlOptions& options);

}  // namespace epd
