// The caller's own memory of one operation (epd_memory_t): what is copied between it and the slot's regions.
// See README, "Memory of the caller's".
#pragma once

#include "operations.h"
#include "step.h"

namespace epd::client {

using stream_kernels::Copies;

// Callers hold the session's mutex. Rows that lie in mapped memory are not copied, but get a place. `out` is
// new, as are the places; they stay so if nothing is to be copied. INVALID_ARGUMENT: a field of the memory,
// or what is copied can't be known.
Status plan_copies(Group& group, const SubmitRequest& request, const RouteUse& use, RowPlan& rows,
                   Copies& out);

// The rows that a call names where its device may use them, and the most bytes of them, as far as the call
// alone says: x or y, and recv_x or out.
struct NamedRows {
  GroupMapped::Rows in;
  GroupMapped::Rows out;
};
NamedRows rows_named(const abi::GroupShape& shape, const SubmitRequest& request);

// Copies on this thread, for a host device. The counts of operations are there.
void copy_in(const Copies& copies);
void copy_out(const Copies& copies);

// The most rows of a dispatch that the caller's memory has room for; 0: it gets no rows.
std::uint32_t room_for_rows(const Copies& copies);
Status too_many_rows(std::uint32_t num_recv_rows, std::uint32_t room);

}  // namespace epd::client
