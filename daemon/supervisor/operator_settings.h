// What engines are to use: the configuration, joins, and what an operator has set, which is stronger than
// both.
#pragma once

#include "proto/link.h"
#include "rooms.h"
#include "supervisor/control_facade.h"

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace epd::supervisor {

class OperatorSettings {
 public:
  explicit OperatorSettings(const Rooms& rooms);

  abi::Settings of_device(std::uint32_t device) const;
  // `joined`: what the ranks on a device have asked for.
  abi::GroupSettings of_group(const abi::GroupSettings& joined) const;

  void set_sms(std::uint32_t device, std::uint32_t sms) { device_sms_[device] = sms; }
  void forget_sms();  // of all devices
  // All that is set for the group now.
  const GroupSettingsChange& set_group(std::uint64_t group_id, const GroupSettingsChange& change);

 private:
  const Rooms& rooms_;
  std::vector<std::optional<std::uint32_t>> device_sms_;         // by device
  std::map<std::uint64_t, GroupSettingsChange> group_settings_;  // by group
};

}  // namespace epd::supervisor
