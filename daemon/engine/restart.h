// What a former engine of the device has left: how far its ranks had come, and what it never answered.
#pragma once

#include "group.h"
#include "session_port.h"

#include <string>

namespace epd::engine {

// The member begins where its board says, or further on.
void catch_up(Member& member, device::Launcher& launcher);

// Ends what the former engine took of the member and never answered: with the cause of the group's break, or
// with success if every rank has completed it.
void answer_orphans(Member& member);

}  // namespace epd::engine
