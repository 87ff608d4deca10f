// The memory of members, as the registry asks for it; and the streams that an engine's successor is to close.
#pragma once

#include "arena_store.h"
#include "base/closer.h"
#include "base/descriptors.h"
#include "membership/registry.h"
#include "proto/link.h"
#include "rooms.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd {

class MemberMemoryStore final : public membership::MemberMemory {
 public:
  struct OpenStreams {
    abi::CloseStreams message;
    UniqueFd user;
  };

  // Closer and budget outlive the store.
  MemberMemoryStore(const Rooms& rooms, Closer& closer, DescriptorBudget& descriptors);
  void set_limits(const ArenaStore::Limits& limits) { arenas_.set_limits(limits); }

  // nullptr if released.
  const MemberArenas* find(std::uint64_t group_id, std::uint32_t rank) const;
  std::uint64_t total_bytes() const { return arenas_.total_bytes(); }
  // What close_streams_later() has been asked for; nothing is left here.
  std::vector<OpenStreams> take_open_streams(std::uint32_t device);

  // MemberMemory
  Status check_reach(std::uint32_t device, std::uint32_t other) const override;
  Status acquire(const membership::MemoryOwner& owner, const UserQuotas& quotas, const abi::GroupShape& shape,
                 const abi::Bindings& bindings, const membership::ClientMemory& memory) override;
  void release(std::uint64_t group_id, std::uint32_t rank) override;
  std::uint64_t next_index(std::uint64_t group_id, std::uint32_t rank) override;
  void close_streams_later(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank) override;
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t culprit_rank) override;

 private:
  const Rooms& rooms_;
  const DescriptorBudget& descriptors_;
  ArenaStore arenas_;
  std::vector<std::vector<OpenStreams>> open_streams_;  // by device, for its next engine
};

}  // namespace epd
