// How a group, and the operations of a rank, are described to a device.
#pragma once

#include "device/launcher.h"
#include "group.h"

#include <vector>

namespace epd::engine {

device::LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority);
// The group as this rank sees it. The rank's memory must be mapped. The lane adds its workspace.
kernels::GroupView group_view(const Group& group, std::uint32_t rank);
// See GroupView::together.
std::uint32_t ranks_together(const Member& member);
// The rank's view, with `together` and `others`, and how it reaches each rank.
kernels::GroupView epoch_view(const Member& member);
std::vector<kernels::PeerView> peer_views(const Group& group);
kernels::MemoryTable memory_table(const Group& group);

}  // namespace epd::engine
