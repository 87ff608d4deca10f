#include "removals.h"

#include "device_list.h"
#include "fleet.h"
#include "live_config.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

}  // namespace

Removals::Removals(const Rooms& rooms) : rooms_(rooms), pending_(rooms.devices.size()) {}

// Its operations may first run to their end, and the breaks of its groups have two deadlines of their own.
void Removals::add(session::Session session) {
  const std::uint64_t patience_ms =
      std::uint64_t{rooms_.config->operation_ms} + 3 * std::uint64_t{rooms_.config->engine_ack_ms};
  pending_[session.device][session.id] = {rooms_.loop.now_ns() + patience_ms * kMsNs, session.peer.uid,
                                          std::move(session.descriptors)};
}

std::uint64_t Removals::of_user(std::uint32_t uid) const {
  std::uint64_t count = 0;
  for (const auto& of_device : pending_) {
    for (const auto& [session, removal] : of_device) count += removal.uid == uid ? 1 : 0;
  }
  return count;
}

void Removals::tick() {
  const std::uint64_t now = rooms_.loop.now_ns();
  for (std::uint32_t device = 0; device < pending_.size(); ++device) {
    for (auto& [session, removal] : pending_[device]) {
      if (removal.due_ns > now) continue;
      // For an engine that is stopped or dying.
      removal.due_ns = now + std::uint64_t{rooms_.config->engine_ack_ms} * kMsNs;
      rooms_.fleet[device].kill_unless_stopped("session " + std::to_string(session) +
                                               " was not removed in time");
    }
  }
}

std::uint64_t Removals::next_due_ns() const {
  std::uint64_t due = std::numeric_limits<std::uint64_t>::max();
  for (const auto& of_device : pending_) {
    for (const auto& [session, removal] : of_device) due = std::min(due, removal.due_ns);
  }
  return due;
}

}  // namespace epd::supervisor
