#include "user_servers.h"

#include "base/log.h"
#include "base/thread.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <unistd.h>
#include <algorithm>
#include <utility>

namespace epd::control {

UserServers::UserServers(Build build, const Callers& callers) : build_(std::move(build)), callers_(callers) {}

UserServers::~UserServers() = default;

bool UserServers::start() {
  privileged_ = build_(true);
  return privileged_ != nullptr;
}

void UserServers::take(int fd, bool privileged) {
  const std::lock_guard lock(mutex_);
  const std::optional<std::uint32_t> uid = callers_.uid_of(fd);
  grpc::Server* server = stopped_ || !uid ? nullptr : privileged ? privileged_.get() : server_of(*uid);
  if (server == nullptr) {
    ::close(fd);  // the end of a socket pair, so its relay ends the connection
    return;
  }
  grpc::AddInsecureChannelFromFd(server, fd);
}

grpc::Server* UserServers::server_of(std::uint32_t uid) {
  const auto is_own = [&](const Room& room) { return room.server != nullptr && room.uid == uid; };
  auto room = std::find_if(rooms_.begin(), rooms_.end(), is_own);
  if (room == rooms_.end()) {
    room = std::find_if(rooms_.begin(), rooms_.end(), [&](const Room& other) {
      return other.server == nullptr || !callers_.is_connected(other.uid);
    });
  }
  if (room == rooms_.end()) return rooms_[uid % kMost].server.get();
  // Not the server of a user who has left: errors of that user stay there.
  if (room->server != nullptr && room->uid != uid) end(room->server, std::chrono::system_clock::now());
  if (room->server == nullptr) {
    const Status threads = room_for_grpc_server();
    if (threads.ok()) room->server = build_(false);
    if (room->server == nullptr) {
      static LogLimiter limiter;
      const std::string why = threads.ok() ? "gRPC could not start a server" : threads.message();
      limiter.log(LogLevel::kError, "control connection lost", {{"reason", why}});
    }
  }
  room->uid = uid;
  return room->server.get();
}

void UserServers::end(std::unique_ptr<grpc::Server>& server, std::chrono::system_clock::time_point deadline) {
  if (server != nullptr) server->Shutdown(deadline);
  server.reset();
}

void UserServers::shutdown(std::chrono::system_clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
  }
  end(privileged_, deadline);
  for (Room& room : rooms_) end(room.server, deadline);
}

}  // namespace epd::control
