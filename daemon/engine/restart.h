// What a former engine of the device has left: how far its ranks had come, and what it never answered.
#pragma once

#include "group.h"
#include "session_port.h"

#include <string>

namespace epd::engine {

// The member begins where its board says, or further on.
void catch_up(Member& member, device::Launcher& launcher);

// Ends what the former engine took of the member and never answered: with `status`, or well, if every rank
// has completed it. `device`: the name.
void answer_orphans(Member& member, StatusCode status, const std::string& device);

}  // namespace epd::engine
