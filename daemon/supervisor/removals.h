// Sessions that have closed but are not yet removed by their engines. They still count as sessions: messages
// to the engine about them may wait in its link, with descriptors.
#pragma once

#include "base/quota.h"
#include "rooms.h"
#include "session/session_table.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::supervisor {

class Removals {
 public:
  explicit Removals(const Rooms& rooms);

  // kRemoveSession must have been sent.
  void add(session::Session session);
  void removed(std::uint32_t device, std::uint64_t session_id) { pending_[device].erase(session_id); }
  void engine_down(std::uint32_t device) { pending_[device].clear(); }
  std::uint64_t of_user(std::uint32_t uid) const;

  // Kills engines that have not answered in time.
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  struct Removal {
    std::uint64_t due_ns;  // when the engine is killed
    std::uint32_t uid;
    DescriptorShare descriptors;
  };

  const Rooms& rooms_;
  std::vector<std::map<std::uint64_t, Removal>> pending_;  // by device, then session
};

}  // namespace epd::supervisor
