// Handles what clients do: sessions open and close, ranks join and leave.
#pragma once

#include "base/closer.h"
#include "base/quota.h"
#include "gpu_work.h"
#include "lifecycle.h"
#include "member_memory_store.h"
#include "memory_maps.h"
#include "orders.h"
#include "removals.h"
#include "rooms.h"
#include "session/session_table.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::supervisor {

class SessionEvents final : public session::SessionHost {
 public:
  struct Parts {
    Orders& orders;
    Removals& removals;
    GpuWork& gpu_work;
    MemoryMaps& maps;
    const Lifecycle& lifecycle;
    Closer& closer;
    DescriptorBudget& descriptors;
  };
  SessionEvents(const Rooms& rooms, const Parts& parts);

  Status may_attach(const PeerIdentity& peer) override;
  Status may_use_device(const PeerIdentity& peer, std::uint32_t device) override;
  Quota max_sessions_of(const PeerIdentity& peer) override;
  std::uint64_t ending_sessions(std::uint32_t uid) const override;
  int engine_bell(std::uint32_t device) const override;
  void session_opened(const session::Session& session) override;
  void session_closed(session::Session session, const std::string& how) override;
  void join_requested(const session::Session& session, std::uint32_t request_id,
                      const abi::Join& join) override;
  void leave_requested(const session::Session& session, std::uint32_t request_id,
                       const abi::Leave& leave) override;
  void map_requested(const session::Session& session, std::uint32_t request_id, const abi::MapMemory& message,
                     std::vector<UniqueFd> memory) override;
  void rows_told(const session::Session& session, const abi::RowsTold& message) override {
    parts_.maps.told(session, message);
  }

 private:
  Status check_map(const session::Session& session, const abi::MapMemory& message,
                   const std::vector<UniqueFd>& memory) const;
  Status keep_memory(std::uint32_t uid, std::vector<UniqueFd> memory, ClientMemory& out);

  const Rooms& rooms_;
  const Parts parts_;
};

}  // namespace epd::supervisor
