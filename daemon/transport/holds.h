// What stands behind received bodies until they are released.
#pragma once

#include "common/status.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace epd::transport {

template <typename T>
class Holds {
 public:
  // Never 0.
  std::uint64_t add(T value) {
    std::uint32_t index = 0;
    if (free_.empty()) {
      index = static_cast<std::uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    Slot& slot = slots_[index];
    slot.value = std::move(value);
    slot.held = true;
    return (static_cast<std::uint64_t>(slot.lap) << 32) | (index + 1u);
  }

  // Of a hold that is there: a body is released once.
  T take(std::uint64_t hold) {
    const std::uint64_t index = (hold & 0xffffffffu) - 1;
    EPD_CHECK(index < slots_.size());
    Slot& slot = slots_[index];
    EPD_CHECK(slot.held && slot.lap == hold >> 32);
    slot.held = false;
    ++slot.lap;
    free_.push_back(static_cast<std::uint32_t>(index));
    return std::exchange(slot.value, T());
  }

  // Calls `f` with each that is held.
  template <typename F>
  void for_each(F f) {
    for (Slot& slot : slots_) {
      if (slot.held) f(slot.value);
    }
  }

 private:
  struct Slot {
    T value{};
    std::uint32_t lap = 0;
    bool held = false;
  };
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
};

}  // namespace epd::transport
