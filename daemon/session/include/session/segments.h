// The shared memory and the doorbell of one session.
#pragma once

#include "common/memory.h"
#include "proto/session.h"

namespace epd::session {

struct Segments {
  UniqueFd a;            // read-write for both
  UniqueFd b;            // read-write: the engine's
  UniqueFd ring_client;  // an eventfd: the engine asks the porter to ring the client
  Mapping b_map;         // the supervisor's own
};
inline constexpr std::uint64_t kSegmentDescriptors = 3;

// Descriptors that only the client and its porter get; closed here when they have been sent.
struct ClientEnds {
  UniqueFd b_read_only;
  // The doorbells: sockets, each shut for one direction (proto/README.md, "Doorbells").
  UniqueFd engine_bell, engine_bell_porter;  // the client sends
  UniqueFd client_bell, client_bell_porter;  // the porter sends
};

// Makes zeroed segments, and writes magic and version.
Result<Segments> make_segments(ClientEnds& client);

// Writes the end of a session into segment B, unless the engine has done so. True: the client must be rung.
bool end_segments(const Segments& segments, const Status& status);
// The engine is away, so the session is not served.
void unserve_segments(const Segments& segments);

}  // namespace epd::session
