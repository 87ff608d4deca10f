#include "rules.h"

#include <cstring>

namespace epd::transport {
namespace {

constexpr std::uint64_t kMostBodyBytes = 1ull << 30;

std::string peer_name(PeerId peer) {
  return "peer " + std::to_string(peer);
}

}  // namespace

Header::Header(std::span<const std::byte> bytes) : size_(static_cast<std::uint32_t>(bytes.size())) {
  EPD_CHECK(bytes.size() <= kMaxHeaderBytes);
  if (!bytes.empty()) std::memcpy(bytes_.data(), bytes.data(), bytes.size());
}

Status check_message(const Limits& limits, std::size_t header_bytes, std::uint64_t body_bytes) {
  if (header_bytes > kMaxHeaderBytes) {
    return invalid_argument("header has " + std::to_string(header_bytes) +
                            " bytes; allowed: " + std::to_string(kMaxHeaderBytes));
  }
  if (body_bytes > limits.max_body_bytes) {
    return invalid_argument("body has " + std::to_string(body_bytes) +
                            " bytes; allowed: " + std::to_string(limits.max_body_bytes));
  }
  return {};
}

Status check_limits(const Limits& limits) {
  if (limits.max_body_bytes > kMostBodyBytes) {
    return invalid_argument("max_body_bytes is " + std::to_string(limits.max_body_bytes) +
                            "; allowed: 0 .. " + std::to_string(kMostBodyBytes));
  }
  if (limits.max_sends == 0) return invalid_argument("max_sends is 0; allowed: 1 and more");
  return {};
}

Status no_such_peer(PeerId peer) {
  return not_found("no " + peer_name(peer));
}
Status too_many_sends(PeerId peer, const Limits& limits) {
  return would_block(peer_name(peer) + " has " + std::to_string(limits.max_sends) +
                     " sends under way, as many as are allowed");
}
Status flush_under_way(PeerId peer) {
  return would_block(peer_name(peer) + " has a flush under way");
}
Status own_address() {
  return invalid_argument("transport address is this transport's own");
}
Status already_connected(PeerId peer) {
  return invalid_argument("transport address is that of " + peer_name(peer) + ", which has not been closed");
}
Status peer_is_down(PeerId peer) {
  return {StatusCode::kAborted, peer_name(peer) + " is down"};
}
Status peer_closed(PeerId peer) {
  return {StatusCode::kAborted, peer_name(peer) + " was closed"};
}

}  // namespace epd::transport
