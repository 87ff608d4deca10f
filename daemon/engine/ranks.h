// What this engine has of the ranks of its groups: their memory and the engines that serve them; and of those
// that its own device serves, the members, with their lanes.
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

  // Of a rank that is active then; what was its memory goes. The descriptors are abi::kRankFds or more. If
  // that fails, what has been mapped stays until mask().
  Status map(Group& group, const abi::GroupRank& message, Packet& packet);
  void mask(Group& group, std::uint32_t rank);
  // It is active since then, on another node.
  void place_far(Group& group, std::uint32_t rank, std::uint64_t since);
  // The memory of all: nothing touches an arena of this group any more.
  void unmap(Group& group);

  // A member of the group, whose memory is mapped. If its lane can't be opened, the group is unusable.
  Result<std::unique_ptr<Member>> serve(Group& group, const abi::GroupMember& message, SessionPort& session,
                                        const Packet& packet) const;
  // Of a member that goes, or stays without a lane: its client may not know yet, and what it submits then is
  // refused when there is no lane to unblock its stream.
  void close_streams_of(const Member& member) const;
  // kCloseStreams: of a rank that this engine does not serve.
  Status close_streams(Packet& packet) const;

  // A rank that begins with this epoch, in a group that runs: its signals are cleared by who will write them,
  // before he does. Its client is told that it has joined when every engine has resumed, so it looks at none
  // before that.
  void clear_signals(const Group& group) const;

 private:
  Status add_peer(Group& group, const abi::GroupRank& message, Packet& packet);
  Status map_arenas(Group& group, const abi::GroupRank& message, const Packet& packet) const;
  Status map_client_memory(Group& group, const abi::GroupRank& message, const Packet& packet) const;
  Status open_lane(Group& group, Member& member) const;
  void clear_memory(const Group& group, const Member& member) const;

  device::Device& device_;
  Page& page_;
  Reclaimer& reclaimer_;
  std::map<std::uint32_t, std::weak_ptr<PeerEngine>> peers_;  // by device: those that groups have
};

}  // namespace epd::engine
