// The control plane: gRPC service epd.v1.Control, health and reflection on a unix socket. Who calls is known
// from the kernel (SO_PEERCRED of the connection), and asked about for each call (ControlFacade::authorize).
#pragma once

#include "common/status.h"
#include "supervisor/control_facade.h"

#include <sys/types.h>
#include <memory>
#include <optional>
#include <string>

namespace epd {

struct ControlOptions {
  std::string socket_path;
  mode_t mode = 0600;          // of the socket; what those who can open it may do, the facade says
  std::optional<gid_t> group;  // owner group; none: the daemon's own
};

class ControlServer {
 public:
  // Listens when it returns. Replaces a socket file on which nobody listens, refuses (ABORTED) one
  // on which somebody does. The socket is never open wider than `mode`, not even for a moment.
  // Errors: INVALID_ARGUMENT (path, mode), NOT_FOUND (directory), PERMISSION_DENIED, ABORTED.
  // `facade` must outlive the server and is called from several threads.
  static Result<std::unique_ptr<ControlServer>> start(ControlFacade& facade, const ControlOptions& options);

  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  ~ControlServer();  // shuts down

  // Health of the whole daemon (""): SERVING needs true here (false at the start) and a facade that
  // says kServing. Any thread; takes effect with the next check.
  void set_serving(bool serving);

  // Refuses new calls, ends open watches, cancels what is left after half a second, removes the
  // socket. A call inside the facade is waited for (the facade's contract: two seconds). Once; more
  // calls do nothing. Not from inside the facade, and not from a thread that the facade needs.
  void shutdown();

 private:
  struct Impl;
  explicit ControlServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace epd
