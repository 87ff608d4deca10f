// The common parts of tests of one side of the membership: a coordinator alone, and an agent alone.
#pragma once

#include "membership_fixture.h"

namespace epd::membership {

inline const ClusterTimes kTimes{100, 2'000, 10'000};
inline const MembershipLimits kLimits{8, 60'000, 3'000, 10'000, 30'000, kLastEpoch};

inline JoinRequest join_request(std::uint64_t session, std::uint32_t rank, std::uint32_t ranks) {
  JoinRequest request;
  request.id = {{kLocalNode, session}, 100};
  request.uid = kUid;
  std::strcpy(request.join.group, "g");
  request.join.rank = static_cast<std::int32_t>(rank);
  request.join.shape = spanning_shape_of(ranks, LossPolicy::kDegrade);
  return request;
}

}  // namespace epd::membership
