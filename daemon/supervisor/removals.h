// Sessions that have closed, and that their engines have yet to let go. They count as sessions: what the
// engine was to be told of them may still wait in its link, with descriptors.
#pragma once

#include "base/descriptors.h"
#include "rooms.h"
#include "session/session_table.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::supervisor {

class Removals {
 public:
  explicit Removals(const Rooms& rooms);

  // Its kRemoveSession has been sent.
  void add(session::Session session);
  void removed(std::uint32_t device, std::uint64_t session_id) { pending_[device].erase(session_id); }
  void engine_down(std::uint32_t device) { pending_[device].clear(); }
  std::uint64_t of_user(std::uint32_t uid) const;

  // Kills engines that have not answered in time.
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  struct Removal {
    std::uint64_t due_ns;  // when patience ends
    std::uint32_t uid;
    DescriptorShare descriptors;
  };

  const Rooms& rooms_;
  std::vector<std::map<std::uint64_t, Removal>> pending_;  // by device, then session
};

}  // namespace epd::supervisor
