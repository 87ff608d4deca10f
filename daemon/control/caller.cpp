#include "caller.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>

namespace epd::control {

void Callers::add(int fd, std::uint64_t connection, supervisor::Operator client) {
  const std::lock_guard lock(mutex_);
  clients_[fd] = {connection, std::move(client)};
}

void Callers::remove(int fd, std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(fd);
  if (found != clients_.end() && found->second.connection == connection) clients_.erase(found);
}

std::optional<std::uint32_t> Callers::uid_of(int fd) const {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(fd);
  return found == clients_.end() ? std::nullopt : std::optional(found->second.who.uid);
}

bool Callers::is_connected(std::uint32_t uid) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(clients_.begin(), clients_.end(),
                     [uid](const auto& entry) { return entry.second.who.uid == uid; });
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
