#include "tables.h"

#include "membership/ids.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace epd::membership {

// ---- nodes

std::string Nodes::name_of(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  const bool named = found != nodes_.end() && !found->second.name.empty();
  return named ? found->second.name : "node " + std::to_string(node);
}

void Nodes::node_lost(std::uint32_t node) {
  std::erase_if(up_, [node](const auto& entry) { return entry.first.node == node; });
  lost_.push_back(node);
  if (lost_.size() <= kMaxLostNodes) return;
  nodes_.erase(lost_.front());
  lost_.pop_front();
}

std::string Nodes::in_words(std::uint32_t node) const {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.name.empty()) return name_of(node);
  const std::string& address = found->second.address;
  return "node " + found->second.name + (address.empty() ? "" : " (" + address + ")");
}

std::string Nodes::in_words(const SessionId& session) const {
  return std::to_string(session.number) + (session.node == kLocalNode ? "" : " of " + name_of(session.node));
}

std::string Nodes::in_words(EngineId engine) const {
  return "the engine of device " + std::to_string(engine.device) +
         (engine.node == kLocalNode ? "" : " of " + name_of(engine.node));
}

FarEngine Nodes::describe(EngineId engine) const {
  const auto found = up_.find(engine);
  return {engine, name_of(engine.node), found == up_.end() ? "" : found->second};
}

Status Nodes::check_device(EngineId engine) const {
  const auto found = nodes_.find(engine.node);
  const std::size_t devices = found == nodes_.end() ? 0 : found->second.devices.size();
  if (engine.device < devices) return {};
  return invalid_argument("device is " + std::to_string(engine.device) + "; allowed: below " +
                          std::to_string(devices) + " on " + name_of(engine.node));
}

Status Nodes::check_network(EngineId engine) const {
  const auto found = up_.find(engine);
  if (found == up_.end() || !found->second.empty()) return {};
  return {StatusCode::kUnsupported,
          "the engine of " + nodes_.at(engine.node).devices.at(engine.device).name + " on " +
              in_words(engine.node) + " has no network to other nodes; see its log, and epctl doctor there"};
}

Status Nodes::check_reach(EngineId engine, EngineId other) const {
  if (engine.node != other.node) return {};
  if (Status status = check_device(engine); !status.ok()) return status;
  if (Status status = check_device(other); !status.ok()) return status;
  const std::vector<DeviceDescription>& devices = nodes_.at(engine.node).devices;
  const DeviceDescription& device = devices.at(engine.device);
  const bool apart = std::find(device.unreachable.begin(), device.unreachable.end(), other.device) !=
                     device.unreachable.end();
  if (!apart) return {};
  return {StatusCode::kUnsupported, device.name + " can't map the memory of " +
                                        devices.at(other.device).name +
                                        " (no P2P between them; nvidia-smi topo -p2p rw)"};
}

// ---- group table

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

// ---- memberships

Result<std::uint32_t> Memberships::take(const JoinRequest& request, std::uint64_t group_id,
                                        std::uint32_t rank) {
  const SessionId session = request.id.session;
  std::vector<Place>& places = sessions_[session];
  auto place = std::find_if(places.begin(), places.end(), [](const Place& p) { return p.group_id == 0; });
  if (place == places.end() && places.size() >= kMaxPerSession) {
    return resource_exhausted("session " + to_string(session) + " is in " + std::to_string(places.size()) +
                              " groups; allowed: " + std::to_string(kMaxPerSession));
  }
  if (place == places.end()) place = places.emplace(places.end());
  const std::uint32_t generation = std::max(place->generation, request.last_generation) % 0xffffu + 1;
  const auto index = static_cast<std::uint32_t>(place - places.begin());
  *place = {group_id, rank, generation, make_member_id(first_index_ + index, generation)};
  return place->member;
}

void Memberships::adopt(SessionId session, std::uint32_t member, std::uint64_t group_id, std::uint32_t rank) {
  std::vector<Place>& places = sessions_[session];
  const std::size_t index = member_index(member) - first_index_;
  if (places.size() <= index) places.resize(index + 1);
  if (places[index].group_id != 0) places.emplace_back();
  Place& place = places[index].group_id == 0 ? places[index] : places.back();
  place = {group_id, rank, member_generation(member), member};
}

void Memberships::free(SessionId session, std::uint32_t member) {
  if (Place* place = find_place(session, member)) place->group_id = 0;
}

const Memberships::Place* Memberships::find(SessionId session, std::uint32_t member) const {
  return const_cast<Memberships*>(this)->find_place(session, member);
}

Memberships::Place* Memberships::find_place(SessionId session, std::uint32_t member) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return nullptr;
  const auto place = std::find_if(found->second.begin(), found->second.end(),
                                  [member](const Place& p) { return p.group_id != 0 && p.member == member; });
  return place == found->second.end() ? nullptr : &*place;
}

std::vector<Memberships::Place> Memberships::of(SessionId session) const {
  std::vector<Place> taken;
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return taken;
  std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(taken),
               [](const Place& place) { return place.group_id != 0; });
  return taken;
}

}  // namespace epd::membership
