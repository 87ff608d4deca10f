// What this engine asks the supervisor for when an operation fails, or when an epoch has no numbers left.
#pragma once

#include "group.h"
#include "supervisor_link.h"

namespace epd::engine {

// Once for each break; of a group that is not active not at all.
void request_break(Group& group, const abi::Break& failure, SupervisorLink& link);

// Whenever the member's next operation has a new number: an epoch whose tags run out is ended.
void renew_numbers(const Member& member, SupervisorLink& link);

}  // namespace epd::engine
