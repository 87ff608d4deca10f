// The events of ranks that are lost.
#pragma once

#include "membership/deciders.h"

#include <cstdint>
#include <optional>
#include <string>

namespace epd::supervisor {

void record_loss(const membership::GroupLabel& group, const membership::Member& member,
                 const std::string& how);

// Records the loss of all memberships of the session, or of one. To be called before the deciders are told,
// so that the loss is recorded before the break that it causes.
void record_losses(const membership::Deciders& deciders, std::uint64_t session_id,
                   std::optional<std::uint32_t> member_id, const std::string& how);

}  // namespace epd::supervisor
