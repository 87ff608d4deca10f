// The memory of members: the arenas and boards of ranks, and the streams that an engine's successor is to
// close.
#pragma once

#include "arena_store.h"
#include "base/closer.h"
#include "base/quota.h"
#include "membership/messages.h"
#include "proto/link.h"
#include "rooms.h"

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace epd::supervisor {

class MemberMemoryStore {
 public:
  struct OpenStreams {
    abi::CloseStreams message;
    UniqueFd user;
  };

  // Closer and budget must outlive the store.
  MemberMemoryStore(const Rooms& rooms, Closer& closer, DescriptorBudget& descriptors);
  void set_limits(const ArenaStore::Limits& limits) { arenas_.set_limits(limits); }

  // See ArenaStore.
  void give_up(std::uint64_t session) { arenas_.give_up(session); }
  void give_up(std::uint64_t group_id, std::uint32_t rank) { arenas_.give_up(group_id, rank); }
  std::optional<ArenaStore::Fullest> fullest() const { return arenas_.fullest(); }
  void hold_to_memory(std::uint32_t uid) { arenas_.hold_to_memory(uid); }

  // nullptr if it was released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;
  MemberArenas* find_to_change(std::uint64_t group_id, std::uint32_t rank) {
    return arenas_.find(group_id, rank);
  }
  std::uint64_t total_bytes() const { return arenas_.total_bytes(); }
  std::uint64_t total_routing_bytes() const { return arenas_.total_routing_bytes(); }
  // Waits of ranks that the group no longer has, for each rank.
  std::vector<WaitSum> gone_waits(std::uint64_t group_id) const { return arenas_.gone_waits(group_id); }
  // The boards of ranks on the device, for all groups or for one. Only while no engine writes them.
  std::vector<membership::BoardIndex> boards_on(std::uint32_t device,
                                                std::optional<std::uint64_t> group_id = {}) const;
  // The streams that close_streams_later() was given. None is left here.
  std::vector<OpenStreams> take_open_streams(std::uint32_t device);

  // Actions of the registry.
  Status acquire(const membership::AcquireMemory& action);
  void release(const membership::ReleaseMemory& action) { arenas_.release(action.group_id, action.rank); }
  void mark_lost(const membership::MarkLost& action);
  void close_streams_later(const membership::CloseStreams& action);

 private:
  const Rooms& rooms_;
  const DescriptorBudget& descriptors_;
  ArenaStore arenas_;
  std::vector<std::vector<OpenStreams>> open_streams_;  // by device, for its next engine
};

}  // namespace epd::supervisor
