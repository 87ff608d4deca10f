#include "operator_settings.h"

#include "device_list.h"
#include "live_config.h"
#include "membership/deciders.h"

namespace epd::supervisor {

OperatorSettings::OperatorSettings(const Rooms& rooms) : rooms_(rooms), device_sms_(rooms.devices.size()) {}

abi::Settings OperatorSettings::of_device(std::uint32_t device) const {
  const LiveConfig& config = rooms_.config;
  abi::Settings settings{
      device_sms_[device].value_or(config->effective_sms(rooms_.devices[device].name.kind)),
      config->operation_ms,
      config->linger_us,
      config->spin_us,
      {}};
  const std::string levels = to_text(config->log_levels());
  abi::set_text(settings.log_levels, levels.data(), levels.size());
  return settings;
}

abi::GroupSettings OperatorSettings::of_group(const abi::GroupSettings& joined) const {
  abi::GroupSettings settings = joined;
  const GroupSettingsChange set = set_for_group(joined.group_id);
  settings.sms = set.sms.value_or(joined.sms);
  settings.priority = set.priority.value_or(joined.priority);
  settings.own_linger = set.linger_us ? 1 : 0;
  settings.linger_us = set.linger_us.value_or(rooms_.config->linger_us);
  return settings;
}

void OperatorSettings::forget_sms() {
  device_sms_.assign(device_sms_.size(), std::nullopt);
}

GroupSettingsChange OperatorSettings::set_group(std::uint64_t group_id, const GroupSettingsChange& change) {
  std::erase_if(group_settings_,
                [this](const auto& entry) { return rooms_.deciders.find(entry.first) == nullptr; });
  GroupSettingsChange& kept = group_settings_[group_id];
  if (change.sms || change.unset_sms) kept.sms = change.sms;
  if (change.priority || change.unset_priority) kept.priority = change.priority;
  if (change.linger_us || change.unset_linger_us) kept.linger_us = change.linger_us;
  return kept;
}

GroupSettingsChange OperatorSettings::set_for_group(std::uint64_t group_id) const {
  const auto found = group_settings_.find(group_id);
  return found == group_settings_.end() ? GroupSettingsChange() : found->second;
}

}  // namespace epd::supervisor
