// What all implementations judge alike, in the same words.
#pragma once

#include "transport/transport.h"

namespace epd::transport {

Status check_message(const Limits& limits, std::size_t header_bytes, std::uint64_t body_bytes);
Status check_limits(const Limits& limits);
Status no_such_peer(PeerId peer);
Status too_many_sends(PeerId peer, const Limits& limits);
Status flush_under_way(PeerId peer);
Status own_address();
Status already_connected(PeerId peer);
Status peer_is_down(PeerId peer);
Status peer_closed(PeerId peer);

}  // namespace epd::transport
