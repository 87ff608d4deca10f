// The common parts of ranks' bodies: they join a group, submit a dispatch of their case, resume.
#pragma once

#include "support/cases.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace epd::test {

// Starts a process for each rank of the case. It attaches to the rank's device, joins the group, runs `body`,
// and leaves.
std::vector<RankProcess> start_group(
    const Daemon& daemon, const Case& c, const std::string& name,
    const std::function<std::string(const Group&, std::uint32_t rank)>& body);

// Submits the rank's dispatch of a round, on slot round % depth.
epd_status_t submit_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t round,
                             std::uint32_t timeout_ms, epd_ticket_t* ticket, epd_handle_t* handle = nullptr);

// Waits for the next epoch. Returns the first operation to repeat.
std::uint64_t resume(const Group& group, std::int32_t timeout_ms);

}  // namespace epd::test
