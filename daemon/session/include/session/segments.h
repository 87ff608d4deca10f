// The shared memory and the doorbell of one session.
#pragma once

#include "base/closer.h"
#include "base/memory.h"
#include "proto/session.h"

namespace epd {

// The doorbell is two: neither lets the client pass a descriptor to whoever is rung, or make him wait
// (proto/README.md, "Doorbells").
struct Segments {
  UniqueFd a;          // read-write for both
  UniqueFd b;          // read-write: the engine's
  SlowFd engine_bell;  // an eventfd; the client rings the engine
  SlowFd client_bell;  // a socket closed for receiving; the engine rings the client
  Mapping b_map;       // the supervisor's own
};
inline constexpr std::uint64_t kSegmentDescriptors = 4;

// What only the client gets; dropped once it has been sent.
struct ClientEnds {
  UniqueFd b_read_only;
  UniqueFd client_bell;
};

// Zeroed segments with magic and version written.
Result<Segments> make_segments(ClientEnds& client, Closer& closer);

// Writes the end of a session into segment B, unless the engine has done so already. True: the client is to
// be woken for it.
bool end_segments(const Segments& segments, const Status& status);
// The engine is down: a session that it served is no longer served.
void unserve_segments(const Segments& segments);

}  // namespace epd
