// What a device is told of a rank's operations: the same for one that is submitted and for a call.
#pragma once

#include "device/launcher.h"
#include "group.h"

namespace epd::engine {

device::LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority);
// The rank itself, whose memory is there; what is the lane's (workspace) excepted.
kernels::cuda::GroupView group_view(const Group& group, std::uint32_t rank);
// And all that are active.
kernels::cuda::DeviceView device_view(const Member& member);

// Where an operation stands in its group's history.
struct OperationPlace {
  std::uint64_t tag = 0;
  std::uint64_t number = 0;       // Group::in_tags
  std::uint64_t routing_tag = 0;  // of the routing that it uses; 0: it makes one
  std::uint32_t num_tokens = 0;
  std::uint32_t half = 0;  // of the routing record
};
kernels::cuda::TakenCall taken_call(const Group& group, const abi::Submission& submission,
                                    const OperationPlace& place);
kernels::cuda::Kind kind_of(abi::Op op);

}  // namespace epd::engine
