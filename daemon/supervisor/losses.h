// The event of ranks that are lost.
#pragma once

#include "deciders.h"

#include <cstdint>
#include <optional>
#include <string>

namespace epd::supervisor {

// Of all memberships of the session, or of one. Before the deciders are told, so that the loss stands before
// the break that it causes.
void record_losses(const Deciders& deciders, std::uint64_t session_id, std::optional<std::uint32_t> member_id,
                   const std::string& how);

}  // namespace epd::supervisor
