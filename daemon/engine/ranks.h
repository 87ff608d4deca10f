// This engine's share of the ranks of its groups: their memory and the engines that serve them. Ranks that
// its own device serves are members and have lanes.
#pragma once

#include "common/packet.h"
#include "device/device.h"
#include "group.h"
#include "page.h"
#include "reclaimer.h"

#include <cstdint>
#include <map>
#include <memory>

namespace epd::engine {

class Ranks {
 public:
  Ranks(device::Device& device, Page& page, Reclaimer& reclaimer)
      : device_(device), page_(page), reclaimer_(reclaimer) {}

  // Maps an active rank, in place of the memory that the rank had before. There must be
  // abi::kRankFds descriptors. After a failure, what has been mapped stays until mask().
  Status map(Group& group, const abi::GroupRank& message, Packet& packet);
  // Maps memory of the rank's client, in place of what has its number, or unmaps that. Calls see it at once.
  Status map_memory(Group& group, const abi::GroupMemory& message, const Packet& packet);
  void mask(Group& group, std::uint32_t rank);
  // The rank is active since that epoch, on another node.
  void place_far(Group& group, std::uint32_t rank, std::uint64_t since);
  // Unmaps the memory of all ranks: nothing touches an arena of this group any more.
  void unmap(Group& group);

  // Makes a member of the group. Its memory must be mapped. If its lane can't be opened, the group is
  // unusable.
  Result<std::unique_ptr<Member>> serve(Group& group, const abi::GroupMember& message, SessionPort& session,
                                        const Packet& packet) const;
  // Handles kCloseStreams, for a rank that this engine does not serve.
  Status close_streams(Packet& packet) const;

  // A rank that joins a running group with this epoch: each engine clears the signals that it will write
  // there, before it writes any. The client is told that it has joined when every engine has resumed, so it
  // reads none before that.
  void clear_signals(const Group& group) const;

 private:
  Status add_peer(Group& group, const abi::GroupRank& message, Packet& packet);
  Status map_arenas(Group& group, const abi::GroupRank& message, const Packet& packet) const;
  Result<std::unique_ptr<device::Arena>> open_memory(const abi::GroupMemory& message,
                                                     const Packet& packet) const;
  Status open_lane(Group& group, Member& member) const;
  void clear_memory(const Group& group, const Member& member) const;

  device::Device& device_;
  Page& page_;
  Reclaimer& reclaimer_;
  std::map<std::uint32_t, std::weak_ptr<PeerEngine>> peers_;  // by device: engines that groups use
};

}  // namespace epd::engine
