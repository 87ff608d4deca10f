#include "callers.h"

#include "base/peer.h"

#include <sys/stat.h>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>

namespace epd::control {
namespace {

// A number that no other open socket has; 0: no descriptor is open there.
ino_t socket_at(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

Status Callers::add(int fd, supervisor::Operator client) {
  const std::lock_guard lock(mutex_);
  std::erase_if(clients_, [](const auto& entry) { return socket_at(entry.first) != entry.second.socket; });
  const std::size_t allowed = is_privileged(client.uid) ? 2 * kMaxConnections : kMaxConnections;
  if (clients_.size() >= allowed) {
    return resource_exhausted("there are " + std::to_string(clients_.size()) +
                              " control connections; allowed: " + std::to_string(allowed));
  }
  clients_[fd] = {socket_at(fd), std::move(client)};
  return {};
}

Result<supervisor::Operator> Callers::caller_of(const grpc::ServerContext& context) const {
  const std::string peer = context.peer();
  constexpr std::string_view kPrefix = "fd:";
  int fd = -1;
  const char* end = peer.data() + peer.size();
  const char* begin = peer.starts_with(kPrefix) ? peer.data() + kPrefix.size() : end;
  const auto [rest, error] = std::from_chars(begin, end, fd);
  if (error != std::errc() || rest != end)
    return internal_error("gRPC calls its peer \"" + peer + "\"; expected: fd:NUMBER");
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(fd);
  if (found == clients_.end()) return Status(StatusCode::kAborted, "the caller's connection has ended");
  supervisor::Operator who = found->second.who;
  who.has_gone = [&context] { return context.IsCancelled(); };
  return who;
}

}  // namespace epd::control
