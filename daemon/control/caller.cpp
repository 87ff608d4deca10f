#include "caller.h"

#include "base/peer.h"

#include <charconv>
#include <string>
#include <string_view>

namespace epd {

// "fd:17". The descriptor is open for as long as a call of its connection lives (acceptor.h), so the number
// is nobody else's; that the client has gone meanwhile changes nothing about who it was.
Result<Operator> caller_of(const grpc::ServerContext& context) {
  const std::string peer = context.peer();
  constexpr std::string_view kPrefix = "fd:";
  int fd = -1;
  const char* end = peer.data() + peer.size();
  const char* begin = peer.starts_with(kPrefix) ? peer.data() + kPrefix.size() : end;
  const auto [rest, error] = std::from_chars(begin, end, fd);
  if (error != std::errc() || rest != end)
    return internal_error("gRPC calls its peer \"" + peer + "\"; expected: fd:NUMBER");
  Result<PeerIdentity> identity = peer_identity(fd);
  if (!identity.ok()) return identity.status();
  return Operator{identity->uid, identity->pid, std::move(identity->gids),
                  [&context] { return context.IsCancelled(); }};
}

}  // namespace epd
