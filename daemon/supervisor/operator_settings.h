// Settings that engines are to use: by the configuration, by joins, and by an operator. The operator's
// settings override the others.
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
  // `joined` is what the ranks on a device have asked for.
  abi::GroupSettings of_group(const abi::GroupSettings& joined) const;

  // No value: as configured.
  void set_sms(std::uint32_t device, std::optional<std::uint32_t> sms) { device_sms_[device] = sms; }
  bool sms_set(std::uint32_t device) const { return device_sms_[device].has_value(); }
  void forget_sms();  // of all devices
  // All settings of the group that are in force now.
  GroupSettingsChange set_group(std::uint64_t group_id, const GroupSettingsChange& change);
  GroupSettingsChange set_for_group(std::uint64_t group_id) const;

 private:
  const Rooms& rooms_;
  std::vector<std::optional<std::uint32_t>> device_sms_;         // by device
  std::map<std::uint64_t, GroupSettingsChange> group_settings_;  // by group
};

}  // namespace epd::supervisor
