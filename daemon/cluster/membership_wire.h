// What agents and coordinator say to each other (membership/cluster_messages.h), as daemons send it
// (epd/v1/membership.proto).
#pragma once

#include "common/status.h"
#include "epd/v1/membership.pb.h"
#include "membership/cluster_messages.h"

namespace epd::cluster {

// Of what a node or its agent says, and what an agent is told. Events and actions that a registry keeps to
// its own side have no message. Texts are cut, and made printable.
v1::membership::ToCoordinator message_of(const membership::ToCoordinator& message);
v1::membership::ToAgent message_of(const membership::ToAgent& message);

// INVALID_ARGUMENT naming the field, its value and what is allowed.
Result<membership::ToCoordinator> parse(const v1::membership::ToCoordinator& message);
Result<membership::ToAgent> parse(const v1::membership::ToAgent& message);

}  // namespace epd::cluster
