// What a device is told of an operation: the same for one that is submitted and for a program, which commands
// name.
#pragma once

#include "announcement.h"
#include "device/launcher.h"
#include "group.h"

namespace epd {

// Where in the group's history it stands.
struct OperationPlace {
  std::uint64_t number = 0;            // Group::in_tags
  abi::OpAnnouncement announcement{};  // its tag is the operation's
  RouteHeads::Place route;             // that it writes or uses
};

LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority);
// Everything but peers, and what is the lane's.
kernels::cuda::Operation describe(const Member& member, const abi::Submission& submission,
                                  const OperationPlace& place);
// An active rank of operation `number`. Of a combine, one that came after the routing's epoch has no rows.
kernels::cuda::Peer describe_peer(const Group& group, const abi::Submission& submission, std::uint32_t rank,
                                  std::uint64_t number, std::uint64_t routing_epoch);
inline bool makes_routing(const abi::Submission& submission) {
  return submission.op == abi::Op::kDispatch && (submission.flags & abi::kFlagCached) == 0;
}
kernels::cuda::Kind kind_of(abi::Op op);

}  // namespace epd
