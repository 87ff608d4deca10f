// Groups that an earlier coordinator has begun, put together from what the nodes report.
#pragma once

#include "membership/cluster_messages.h"
#include "membership/group.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::membership {

class Adoption {
 public:
  void add(std::uint32_t node, const GroupReport& report);
  // Those whose ranks are all reported, and told alike.
  std::vector<Group> whole() const;

 private:
  struct Reports {
    GroupReport first;
    bool alike = true;
    Group group;
  };
  std::map<std::uint64_t, Reports> groups_;
};

}  // namespace epd::membership
