// The groups, by number and by name.
#pragma once

#include "common/status.h"
#include "membership/group.h"

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

using GroupName = std::pair<std::uint32_t, std::string>;  // uid, name

class GroupTable {
 public:
  explicit GroupTable(std::uint64_t first_id, std::set<std::uint64_t> taken_ids = {})
      : next_id_(first_id), taken_ids_(std::move(taken_ids)) {}

  const std::map<std::uint64_t, Group>& all() const { return groups_; }
  std::map<std::uint64_t, Group>& all() { return groups_; }
  std::vector<std::uint64_t> ids() const;
  Group* find(std::uint64_t group_id);
  // Of those that may be joined or named.
  Group* find_named(const GroupName& name);
  EngineSlot* find_slot(std::uint64_t group_id, EngineId engine);

  // RESOURCE_EXHAUSTED: no further group for this user, nor, if there are several nodes, for the rank's node.
  Status check_quotas(const JoinRequest& request, std::uint32_t max_groups, bool several_nodes) const;
  std::uint64_t count_if(const std::function<bool(const Group&)>& test) const;
  Group& add(const JoinRequest& request, std::uint64_t now_ns);
  // One that another registry has begun.
  Group& put(Group group);
  // A group that ends keeps no one from forming the next one under its name.
  void drop_name(const Group& group);
  void erase(std::uint64_t group_id);

 private:
  std::uint64_t next_id_;
  const std::set<std::uint64_t> taken_ids_;  // no new group gets one of them
  std::map<std::uint64_t, Group> groups_;
  std::map<GroupName, std::uint64_t> names_;
};

}  // namespace epd::membership
