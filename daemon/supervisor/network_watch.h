// Follows the network of this machine. An interface that engines use may get another address, and one may be
// found only later, when names can be resolved and there are routes. Engines that start later use what is
// known by then. An engine that no group uses starts again for it; of another one `problem` tells.
#pragma once

#include "network.h"
#include "rooms.h"

#include <sys/types.h>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace epd::supervisor {

class Lifecycle;

class NetworkWatch {
 public:
  struct Parts {
    const Lifecycle& lifecycle;
  };
  NetworkWatch(const Rooms& rooms, const Parts& parts) : rooms_(rooms), parts_(parts) {}

  // Must be called in each turn, after the fleet's tick: engines start there.
  void tick();
  std::uint64_t next_due_ns() const;

  // The fault of the network that the engine was started with; "": none.
  std::string problem(std::uint32_t device) const;

 private:
  // A look takes long if the resolver does not answer. So a thread of its own takes each, which outlives the
  // watch if it must.
  struct Look;
  struct Engine {
    std::int32_t pid = 0;
    NetworkChoice given;  // as it was started
  };

  void note_engines();
  bool take(const NetworkChoice& seen);
  void start_look();
  bool is_outdated(std::uint32_t device) const;
  bool is_idle(std::uint32_t device) const;
  void restart_idle();

  const Rooms& rooms_;
  const Parts parts_;
  std::vector<Engine> engines_;
  std::shared_ptr<Look> look_;         // under way; null: none
  std::optional<NetworkChoice> seen_;  // by the last look
  std::uint64_t next_look_ns_ = 0;
};

}  // namespace epd::supervisor
