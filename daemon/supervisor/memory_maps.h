// Memory of clients' own that the engines of their groups map while the groups run, so that rows of calls may
// lie there. An entry is told to all engines of the group, and to those that start later. Its client may use
// it when all have mapped it. If one can't, none keeps it.
#pragma once

#include "member_memory_store.h"
#include "orders.h"
#include "rooms.h"
#include "session/session_table.h"

#include <cstdint>

namespace epd::supervisor {

class MemoryMaps {
 public:
  MemoryMaps(const Rooms& rooms, Orders& orders) : rooms_(rooms), orders_(orders) {}

  // Answered when all engines have. `memory`: null, or the one descriptor.
  void requested(const session::Session& session, std::uint32_t request_id, const abi::MapMemory& message,
                 ClientMemory memory);
  // A client has counted what has become of rows of a rank.
  void told(const session::Session& session, const abi::RowsTold& message);
  // An engine has answered.
  void answered(std::uint32_t device, const abi::MemoryMapped& message);

 private:
  void send(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank, const MemberArenas& arenas,
            const MappedByEngines& entry);
  void give_up(const abi::MemoryMapped& message, MemberArenas& arenas, const Status& status);

  const Rooms& rooms_;
  Orders& orders_;
};

}  // namespace epd::supervisor
