// The shared memory and the doorbell of one session.
#pragma once

#include "base/memory.h"
#include "proto/session.h"

namespace epd {

struct Segments {
  UniqueFd a;            // read-write for both
  UniqueFd b;            // read-write: the engine's
  UniqueFd bell_engine;  // the engine's end; kept so that the next engine gets it too
  Mapping b_map;         // the supervisor's own
};

// What only the client gets; dropped once it has been sent.
struct ClientEnds {
  UniqueFd b_read_only;
  UniqueFd bell;
};

// Zeroed segments with magic and version written.
Result<Segments> make_segments(ClientEnds& client);

// Writes the end of a session into segment B, unless the engine has done so already, and wakes the
// client.
void end_segments(const Segments& segments, const Status& status);
// For what was written where the client reads while no engine could ring.
void wake_client(const Segments& segments);
// The engine is down: a session that it served is no longer served.
void unserve_segments(const Segments& segments);

}  // namespace epd
