// Accepts connections of the control plane, notes who made each, and gives them away. gRPC's own listener
// does not say who calls. No gRPC here.
#pragma once

#include "base/socket_use.h"
#include "callers.h"
#include "common/fd.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace epd::control {

class Acceptor {
 public:
  // Owns the connection. Called on the acceptor's thread.
  using Take = std::function<void(int fd)>;
  // `callers` outlives the acceptor, and knows each connection before take().
  static Result<std::unique_ptr<Acceptor>> start(UniqueFd listener, std::string path, Callers& callers,
                                                 Take take);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Accepts no more connections, and removes the socket. Open connections go on.
  void stop();

 private:
  Acceptor(UniqueFd listener, UniqueFd wake, std::string path, Callers& callers, Take take)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        path_(std::move(path)),
        file_(file_at(path_)),
        callers_(callers),
        take_(std::move(take)) {}
  void run();
  void admit(UniqueFd connection);

  UniqueFd listener_;    // used by the thread alone while it runs
  const UniqueFd wake_;  // rung once, to end the thread
  const std::string path_;
  const FileId file_;  // there
  Callers& callers_;
  const Take take_;
  std::thread thread_;
};

}  // namespace epd::control
