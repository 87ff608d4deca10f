// How operations fail. The words are the same for all devices.
#pragma once

#include "device/launcher.h"
#include "group.h"
#include "proto/call_words.h"

#include <cstdint>
#include <string>

namespace epd::engine {

struct Failure {
  StatusCode cause = StatusCode::kInternal;
  std::int32_t failed_rank = -1;  // a rank, or -1
  std::string text;
};

// The operation that failed.
struct Subject {
  const Member& member;
  const abi::Call& call;
  std::uint64_t index;
};

abi::Break as_break(const Group& group, const Failure& failure);
// One line of the log for an operation that has failed, limited for each group. At info if its own client has
// left.
void log_failure(const Member& member, abi::Op op, std::uint64_t index, const Failure& failure);

// "operation 7 (dispatch, slot 1) of rank 2 ended after 30000 ms"
std::string ended_after(const Subject& subject, std::uint64_t ms);
// `routing`: for example "the routing of dispatch 3".
Failure changed_group_failure(const Subject& subject, const std::string& routing,
                              std::uint64_t routing_epoch);
// Why an operation waited in vain for `rank`: its engine has not responded for `still_ms` (if not 0), or else
// `else_text`.
std::string awaited_text(const Group& group, std::uint32_t rank, std::uint64_t still_ms,
                         const std::string& else_text);
// The failure that a device reports for an operation which it ran. `ended_after`: see above.
Failure device_failure(const Subject& subject, device::Launcher& launcher, const kernels::OpResult& result,
                       const std::string& ended_after, std::uint64_t now_ns);

// The block of this rank in its exchange arena.
std::byte* own_block(const Member& member, std::uint64_t index);

}  // namespace epd::engine
