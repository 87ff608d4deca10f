// Owning handles for libepd's sessions and groups.
#pragma once

#include "epd/epd.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace epd::kit {

struct DetachSession {
  void operator()(epd_session_t* session) const { epd_session_detach(session); }
};
using SessionPtr = std::unique_ptr<epd_session_t, DetachSession>;

struct LeaveGroup {
  void operator()(epd_group_t* group) const { epd_group_leave(group); }
};
using GroupPtr = std::unique_ptr<epd_group_t, LeaveGroup>;

// Tries again while no daemon listens, for at most `patience`. Throws ToolError.
SessionPtr attach(const std::string& socket, const std::string& device,
                  std::chrono::milliseconds patience = std::chrono::seconds(10),
                  epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP);
// Name and version of the daemon.
std::string daemon_name(const epd_session_t* session);
GroupPtr join(epd_session_t* session, const epd_group_config_t& config);
epd_buffers_t buffers_of(const epd_group_t* group, std::uint32_t slot);

// Submit and wait, throwing ToolError for any status but OK.
epd_ticket_t submit(epd_group_t* group, const epd_dispatch_args_t& args, void* stream, epd_handle_t* handle);
epd_ticket_t submit(epd_group_t* group, const epd_combine_args_t& args, void* stream);
// The same with defaults, in no stream.
epd_ticket_t submit_dispatch(epd_group_t* group, std::uint32_t slot, std::uint32_t num_tokens,
                             epd_handle_t* handle);
epd_ticket_t submit_combine(epd_group_t* group, std::uint32_t slot, epd_handle_t handle);
epd_result_t finish(epd_group_t* group, epd_ticket_t ticket, const char* what);

// Monotonic time in microseconds.
double now_us();

}  // namespace epd::kit
