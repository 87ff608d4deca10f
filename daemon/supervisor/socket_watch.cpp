#include "socket_watch.h"

#include "base/event.h"

#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kLookNs = 1'000'000'000;

}  // namespace

void SocketWatch::begin(const std::string& attach_socket, const std::string& control_socket) {
  sockets_ = {{attach_socket, file_at(attach_socket), "clients can't attach"},
              {control_socket, file_at(control_socket), "epctl can't connect"}};
}

void SocketWatch::tick(std::uint64_t now_ns) {
  if (now_ns < next_look_ns_) return;
  next_look_ns_ = now_ns + kLookNs;
  std::string problem;
  for (const Socket& socket : sockets_) {
    const FileId now = file_at(socket.path);
    if (now == socket.file && now != FileId()) continue;
    problem += problem.empty() ? "" : "; ";
    problem += socket.path + (now == FileId() ? " has been removed: " : " has been replaced: ") + socket.who;
  }
  if (problem == problem_) return;
  problem_ = std::move(problem);
  if (problem_.empty()) {
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "files of sockets are back");
  } else {
    record_event(EventKind::kDaemonState, LogLevel::kError, "files of sockets are gone",
                 {{"reason", problem_}, {"advice", "restart epd"}});
  }
}

}  // namespace epd::supervisor
