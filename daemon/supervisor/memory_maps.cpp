#include "memory_maps.h"

#include "device_list.h"
#include "membership/deciders.h"

#include <optional>
#include <utility>
#include <vector>

namespace epd::supervisor {
namespace {

// The rank of a membership, and the devices whose engines serve its group.
struct Place {
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  std::set<std::uint32_t> devices;
};

std::optional<Place> find_member(const membership::Deciders& deciders, std::uint64_t session_id,
                                 std::uint32_t number) {
  std::optional<Place> found;
  deciders.each([&](const membership::Group& group) {
    for (const auto& [rank, member] : group.members) {
      if (member.session != membership::SessionId{membership::kLocalNode, session_id} ||
          member.member != number)
        continue;
      found = Place{group.id, rank, {}};
      for (const auto& [engine, slot] : group.engines) found->devices.insert(engine.device);
    }
  });
  return found;
}

}  // namespace

void MemoryMaps::send(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank,
                      const MemberArenas& arenas, const MappedByEngines& entry) {
  const device::DeviceName& name = rooms_.devices[device].name;
  const bool here = arenas.device.kind == name.kind && arenas.device.index == name.index;
  orders_.send(device, abi::LinkType::kMapMemory,
               abi::GroupMemory{group_id, rank, here ? 1u : 0u, entry.range}, entry.fds());
}

void MemoryMaps::requested(const session::Session& session, std::uint32_t request_id,
                           const abi::MapMemory& message, ClientMemory memory) {
  const std::optional<Place> place = find_member(rooms_.deciders, session.id, message.member);
  MemberArenas* const arenas = place ? rooms_.memory.find_to_change(place->group_id, place->rank) : nullptr;
  if (arenas == nullptr) {
    orders_.refuse(session.id, request_id,
                   Status(StatusCode::kNotFound,
                          "member is " + std::to_string(message.member) + "; allowed: one of this session"));
    return;
  }
  MappedByEngines& entry = arenas->mapped[message.range.number];
  if (entry.request != 0) {
    orders_.refuse(session.id, entry.request,
                   Status(StatusCode::kAborted, "another memory with the same number came after it"));
  }
  entry = {message.range, std::move(memory), place->devices, {}, message.member, request_id};
  // A call must not be accepted by the rank's own device while others have unmapped what it names.
  if (message.range.by == abi::MemoryBy::kNothing && entry.awaited.erase(session.device) != 0)
    entry.later = std::exchange(entry.awaited, {session.device});
  const std::set<std::uint32_t> devices = entry.awaited;
  for (const std::uint32_t device : devices) send(device, place->group_id, place->rank, *arenas, entry);
}

void MemoryMaps::told(const session::Session& session, const abi::RowsTold& message) {
  const std::optional<Place> place = find_member(rooms_.deciders, session.id, message.member);
  MemberArenas* const arenas = place ? rooms_.memory.find_to_change(place->group_id, place->rank) : nullptr;
  if (arenas != nullptr) arenas->rows = message.counts;
}

void MemoryMaps::answered(std::uint32_t device, const abi::MemoryMapped& message) {
  MemberArenas* const arenas = rooms_.memory.find_to_change(message.group_id, message.rank);
  if (arenas == nullptr) return;
  const auto found = arenas->mapped.find(message.number);
  if (found == arenas->mapped.end() || found->second.range.generation != message.generation) return;
  MappedByEngines& entry = found->second;
  if (message.status != StatusCode::kOk) {
    const std::string text(message.text, abi::text_length(message.text));
    give_up(message, *arenas, {message.status, rooms_.devices[device].name.text() + ": " + text});
    return;
  }
  entry.awaited.erase(device);
  if (!entry.awaited.empty()) return;
  entry.awaited = std::exchange(entry.later, {});
  for (const std::uint32_t other : entry.awaited) send(other, message.group_id, message.rank, *arenas, entry);
  if (!entry.awaited.empty()) return;
  if (entry.request != 0) {
    rooms_.sessions.reply(arenas->wanted.session, std::exchange(entry.request, 0), abi::AttachType::kMapped,
                          abi::Mapped{entry.member, message.number});
  }
  if (entry.range.by == abi::MemoryBy::kNothing) arenas->mapped.erase(found);
}

// Engines that have mapped the memory drop it before they handle any later message.
void MemoryMaps::give_up(const abi::MemoryMapped& message, MemberArenas& arenas, const Status& status) {
  MappedByEngines entry = std::move(arenas.mapped[message.number]);
  arenas.mapped.erase(message.number);
  entry.range.by = abi::MemoryBy::kNothing;
  entry.memory = nullptr;
  std::vector<std::uint32_t> devices;  // what is sent may change the group
  if (const membership::Group* group = rooms_.deciders.find(message.group_id); group != nullptr) {
    for (const auto& [engine, slot] : group->engines) devices.push_back(engine.device);
  }
  for (const std::uint32_t device : devices) send(device, message.group_id, message.rank, arenas, entry);
  if (entry.request != 0) {
    rooms_.sessions.refuse(arenas.wanted.session, entry.request, status);
    return;
  }
  log_event(LogLevel::kWarning, "memory of a rank is not mapped any more",
            {{"group", message.group_id}, {"rank", message.rank}, {"reason", status.message()}});
}

}  // namespace epd::supervisor
