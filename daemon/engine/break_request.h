// The engine's request to the supervisor when an operation fails, or when the numbers of an epoch run out.
#pragma once

#include "group.h"
#include "supervisor_link.h"

namespace epd::engine {

// Asks once for each break. Does nothing if the group is not active.
void request_break(Group& group, const abi::Break& failure, SupervisorLink& link);

// Called whenever the member's next operation has a new number: ends an epoch whose tags run out.
void renew_numbers(const Member& member, SupervisorLink& link);

}  // namespace epd::engine
