// What a device that runs whole operations is told of one: the same for one that is launched and for a
// program, which commands name.
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
// Of a combine, ranks that came after place.route.head.epoch have no rows.
kernels::cuda::Operation describe(const Member& member, const abi::Submission& submission,
                                  const OperationPlace& place);
inline bool makes_routing(const abi::Submission& submission) {
  return submission.op == abi::Op::kDispatch && (submission.flags & abi::kFlagCached) == 0;
}
kernels::cuda::Kind kind_of(abi::Op op);

}  // namespace epd
