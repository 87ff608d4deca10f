// How an operation is described to a device. It is the same for submissions and calls.
#pragma once

#include "device/launcher.h"
#include "group.h"

#include <vector>

namespace epd::engine {

device::LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority);
// The group as this rank sees it. The rank's memory must be mapped. The lane adds its workspace.
kernels::cuda::GroupView group_view(const Group& group, std::uint32_t rank);
// See GroupView::together.
std::uint32_t ranks_together(const Member& member);
// The rank's view, with `together` and `others`, and how it reaches each rank.
kernels::cuda::GroupView epoch_view(const Member& member);
std::vector<kernels::cuda::PeerView> peer_views(const Group& group);
kernels::cuda::MemoryTable memory_table(const Group& group);

// Where an operation stands in its group's history.
struct OperationPlace {
  std::uint64_t tag = 0;
  std::uint64_t number = 0;       // Group::in_tags
  std::uint64_t routing_tag = 0;  // of the routing that it uses; 0: it makes one
  std::uint32_t num_tokens = 0;
  std::uint32_t half = 0;  // which half of the routing record
};
kernels::cuda::TakenCall taken_call(const Group& group, const abi::Submission& submission,
                                    const OperationPlace& place);

}  // namespace epd::engine
