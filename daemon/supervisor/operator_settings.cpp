#include "operator_settings.h"

#include "deciders.h"
#include "device_list.h"
#include "live_config.h"

namespace epd::supervisor {

OperatorSettings::OperatorSettings(const Rooms& rooms) : rooms_(rooms), device_sms_(rooms.devices.size()) {}

abi::Settings OperatorSettings::of_device(std::uint32_t device) const {
  const LiveConfig& config = rooms_.config;
  return {device_sms_[device].value_or(config->effective_sms(rooms_.devices[device].name.kind)),
          config->operation_ms, config->spin_us, config->log_level};
}

abi::GroupSettings OperatorSettings::of_group(const abi::GroupSettings& joined) const {
  abi::GroupSettings settings = joined;
  const auto found = group_settings_.find(joined.group_id);
  if (found == group_settings_.end()) return settings;
  if (found->second.sms) settings.sms = *found->second.sms;
  if (found->second.priority) settings.priority = *found->second.priority;
  return settings;
}

void OperatorSettings::forget_sms() {
  device_sms_.assign(device_sms_.size(), std::nullopt);
}

const GroupSettingsChange& OperatorSettings::set_group(std::uint64_t group_id,
                                                       const GroupSettingsChange& change) {
  std::erase_if(group_settings_, [this](const auto& entry) { return !rooms_.deciders.find(entry.first); });
  GroupSettingsChange& kept = group_settings_[group_id];
  if (change.sms) kept.sms = change.sms;
  if (change.priority) kept.priority = change.priority;
  return kept;
}

}  // namespace epd::supervisor
