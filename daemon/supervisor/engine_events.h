// Handles what engines do: start, send messages, wait, and end.
#pragma once

#include "fleet.h"
#include "gpu_work.h"
#include "memory_maps.h"
#include "operator_settings.h"
#include "orders.h"
#include "removals.h"
#include "rooms.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>

namespace epd::supervisor {

class EngineEvents final : public FleetHost {
 public:
  struct Parts {
    Orders& orders;
    Removals& removals;
    GpuWork& gpu_work;
    MemoryMaps& maps;
    const OperatorSettings& settings;
  };
  EngineEvents(const Rooms& rooms, const Parts& parts);

  void engine_ready(std::uint32_t device) override;
  void engine_message(std::uint32_t device, const Packet& packet) override;
  void engine_down(std::uint32_t device, const std::string& text, EngineEnd end) override;
  void engine_waits(std::uint32_t device) override;
  void before_kill(std::uint32_t device, std::function<void()> then) override;
  void engine_failed(std::uint32_t device, const std::string& text) override;

 private:
  template <typename T>
  std::optional<T> read(std::uint32_t device, const Packet& packet);
  // Gives the deciders an event about an engine.
  template <typename Event>
  void tell(std::uint32_t device, const Packet& packet);
  void tell_ready(std::uint32_t device, const Packet& packet);
  void tell_peer_lost(std::uint32_t device, const Packet& packet);
  void session_failed(const abi::SessionFailed& message);
  void end_dying_sessions(std::uint32_t device);
  void make_room();

  const Rooms& rooms_;
  const Parts parts_;
};

}  // namespace epd::supervisor
