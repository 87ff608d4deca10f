// The control plane: the gRPC service epd.v1.Control, health and reflection on a unix socket. The kernel says
// who calls (SO_PEERCRED of the connection). ControlFacade::authorize decides for each call.
#pragma once

#include "base/call_times.h"
#include "common/status.h"
#include "supervisor/control_facade.h"

#include <sys/types.h>
#include <memory>
#include <optional>
#include <string>

namespace epd::control {

struct ControlOptions {
  std::string socket_path;
  mode_t mode = 0600;          // of the socket; the facade decides what a user may do
  std::optional<gid_t> group;  // owner group; none: the daemon's own
};

class ControlServer {
 public:
  // Listens when it returns. Replaces a socket file on which no process listens, and refuses (ABORTED) one on
  // which a process does. The socket is never more open than `mode`. Errors: INVALID_ARGUMENT (path, mode),
  // NOT_FOUND (directory), PERMISSION_DENIED, ABORTED. `facade` outlives the server and is called from
  // several threads.
  static Result<std::unique_ptr<ControlServer>> start(supervisor::ControlFacade& facade,
                                                      const ControlOptions& options);

  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  ~ControlServer();  // shuts down

  // Health of the whole daemon (""): SERVING needs true here (false at the start) and a facade that
  // says kServing. Any thread; takes effect with the next check.
  void set_serving(bool serving);

  // Times of answered calls by method; a watch counts when it has ended. Lives as long as the server.
  const CallTimes& times() const;

  // Whether that service of grpc.health.v1 is SERVING. Any thread; asks the facade.
  bool healthy(const std::string& service) const;

  // Refuses new calls, ends open watches, cancels other calls after half a second, and removes the socket.
  // Waits for a call inside the facade (its contract: two seconds). Later calls do nothing. Not from inside
  // the facade, and not from a thread that the facade needs.
  void shutdown();

 private:
  struct Impl;
  explicit ControlServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace epd::control
