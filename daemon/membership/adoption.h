// Groups that an earlier coordinator has begun, put together from what the nodes report. A report that no
// honest node makes counts for nothing: its node is told that the group ends.
#pragma once

#include "membership/cluster_messages.h"
#include "membership/group.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace epd::membership {

class Adoption {
 public:
  struct Reporter {
    std::uint32_t node = 0;
    std::size_t num_devices = 0;
  };
  // `first_group_id`: of the coordinator that adopts; none of its own groups is reported.
  explicit Adoption(std::uint64_t first_group_id) : first_group_id_(first_group_id) {}

  void add(const Reporter& reporter, const GroupReport& report);
  // Those whose ranks are all reported, and told alike.
  std::vector<Group> whole() const;

 private:
  struct Reports {
    GroupReport first;
    bool alike = true;
    Group group;
  };
  bool is_sound(const GroupDescription& told) const;
  // Of a rank of a sound description. Each membership has a number of its own.
  bool is_sound(const Reporter& reporter, const GroupDescription& told, const RankReport& rank) const;

  const std::uint64_t first_group_id_;
  std::map<std::uint64_t, Reports> groups_;
  std::set<std::pair<SessionId, std::uint32_t>> members_;  // that are reported
};

}  // namespace epd::membership
