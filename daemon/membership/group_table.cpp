#include "group_table.h"

#include <algorithm>

namespace epd::membership {

std::vector<std::uint64_t> GroupTable::ids() const {
  std::vector<std::uint64_t> ids;
  ids.reserve(groups_.size());
  for (const auto& [id, group] : groups_) ids.push_back(id);
  return ids;
}

Group* GroupTable::find(std::uint64_t group_id) {
  const auto found = groups_.find(group_id);
  return found == groups_.end() ? nullptr : &found->second;
}

Group* GroupTable::find_named(const GroupName& name) {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : &groups_.at(found->second);
}

EngineSlot* GroupTable::find_slot(std::uint64_t group_id, EngineId engine) {
  Group* group = find(group_id);
  if (group == nullptr) return nullptr;
  const auto slot = group->engines.find(engine);
  return slot == group->engines.end() ? nullptr : &slot->second;
}

std::uint64_t GroupTable::count_if(const std::function<bool(const Group&)>& test) const {
  return static_cast<std::uint64_t>(
      std::count_if(groups_.begin(), groups_.end(), [&](const auto& entry) { return test(entry.second); }));
}

Status GroupTable::check_quotas(const JoinRequest& request, std::uint32_t max_groups,
                                bool several_nodes) const {
  if (groups_.size() >= max_groups) {
    return resource_exhausted("there are " + std::to_string(groups_.size()) +
                              " groups; allowed: " + std::to_string(max_groups) + " (limits.max_groups)");
  }
  const std::uint32_t node = request.id.session.node;
  const std::uint64_t of_node = count_if([&](const Group& group) { return group.sole_node == node; });
  if (several_nodes && of_node >= share_of_one(max_groups)) {
    return resource_exhausted(
        "ranks of this node alone are in " + std::to_string(of_node) + " groups that span nodes; allowed: " +
        std::to_string(share_of_one(max_groups)) + " (3/4 of the coordinator's limits.max_groups)");
  }
  const std::uint64_t of_user = count_if([&](const Group& group) { return group.uid == request.uid; });
  if (of_user < request.max_groups.limit) return {};
  return over_quota(request.uid, of_user, "groups", request.max_groups);
}

Group& GroupTable::add(const JoinRequest& request, std::uint64_t now_ns) {
  while (taken_ids_.contains(next_id_)) ++next_id_;
  const std::uint64_t id = next_id_++;
  Group& group = groups_[id];
  group.id = id;
  group.uid = request.uid;
  group.sole_node = request.id.session.node;
  group.name = request.join.group;
  group.shape = request.join.shape;
  group.asked_sum_ranks = group.shape.sum_ranks;
  group.device_kind = request.device_kind;
  group.created_ns = now_ns;
  names_[{group.uid, group.name}] = id;
  return group;
}

Group& GroupTable::put(Group group) {
  const std::uint64_t id = group.id;
  names_[{group.uid, group.name}] = id;
  return groups_[id] = std::move(group);
}

void GroupTable::drop_name(const Group& group) {
  const auto found = names_.find({group.uid, group.name});
  if (found != names_.end() && found->second == group.id) names_.erase(found);
}

void GroupTable::erase(std::uint64_t group_id) {
  drop_name(groups_.at(group_id));
  groups_.erase(group_id);
}

}  // namespace epd::membership
