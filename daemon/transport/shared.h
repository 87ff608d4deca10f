#pragma once

#include "common/status.h"
#include "transport/transport.h"

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace epd::transport {

// The envelope of an address: its transport, and a checksum, so that UCX never sees bytes that no transport
// wrote.
enum class AddressKind : std::uint16_t { kInProcess = 1, kUcx = 2 };

struct AddressParts {
  AddressKind kind = AddressKind::kInProcess;
  std::uint64_t transport = 0;  // random: no two transports have the same
  std::uint64_t detail = 0;     // in process: the network; UCX: its version
  std::span<const std::byte> payload;
};

// RESOURCE_EXHAUSTED: longer than kMaxAddressBytes.
Result<Address> make_address(const AddressParts& parts);
// The payload points into `address`.
Result<AddressParts> read_address(std::span<const std::byte> address, AddressKind expected);

std::uint64_t random_id();

Status check_message(const Limits& limits, std::size_t header_bytes, std::uint64_t body_bytes);
Status check_limits(const Limits& limits);
Status no_such_peer(PeerId peer);
Status too_many_sends(PeerId peer, const Limits& limits);
Status flush_under_way(PeerId peer);
Status own_address();
Status already_connected(PeerId peer);
Status peer_is_down(PeerId peer);
Status peer_closed(PeerId peer);

// Objects that received bodies keep until they are released.
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

  // The hold exists: a body is released once.
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
