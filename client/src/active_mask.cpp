#include "active_mask.h"

#include "device.h"
#include "group.h"

#include <atomic>

namespace epd::client {

const std::int32_t* active_mask_of(const Group& group) {
  if (group.device_user.address() == 0) return group.user.as<const std::int32_t>(group.arena.active);
  return reinterpret_cast<const std::int32_t*>(group.device_user.address() + group.arena.active);  // NOLINT
}

Status ActiveMask::write(const Group& group, Device* device) {
  const std::lock_guard lock(mutex_);
  bool changed = false;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    const std::int32_t active = group.board.active(rank) ? 1 : 0;
    if (written_[rank] == active) continue;
    changed = true;
    if (device == nullptr) {
      auto* const words = group.user.as<std::int32_t>(group.arena.active);
      std::atomic_ref(words[rank]).store(active, std::memory_order_release);
    } else {
      const std::uintptr_t word = group.device_user.address() + group.arena.active + rank * sizeof(active);
      if (Status status = device->write_aside(word, static_cast<std::uint32_t>(active)); !status.ok())
        return status;
    }
    written_[rank] = active;
  }
  return changed && device != nullptr ? device->finish_aside() : Status();
}

}  // namespace epd::client
