// The objects that the parts of the supervisor share. The node owns one of each. All belong to the loop,
// unless a declaration says otherwise.
#pragma once

#include "base/clock.h"

#include <array>
#include <cstdint>

namespace epd::membership {
class Deciders;
}  // namespace epd::membership
namespace epd::session {
class SessionTable;
}  // namespace epd::session

namespace epd::supervisor {

class Loop;
class LiveConfig;
class DeviceList;
class EngineFleet;
class MemberMemoryStore;

// One run of the daemon.
struct DaemonLife {
  std::array<std::uint8_t, 16> boot_id{};
  std::uint64_t started_ns = 0;  // CLOCK_MONOTONIC
};

struct Rooms {
  Loop& loop;
  const Clock& clock;  // CLOCK_MONOTONIC, as shown to others; deadlines use the loop's clock
  const DaemonLife& life;
  LiveConfig& config;
  const DeviceList& devices;
  session::SessionTable& sessions;
  EngineFleet& fleet;
  MemberMemoryStore& memory;
  membership::Deciders& deciders;
};

}  // namespace epd::supervisor
