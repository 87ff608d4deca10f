// epctl set, reload, evict and restart: what an operator changes.
#include "commands.h"
#include "numbers.h"
#include "proto/shape.h"
#include "table.h"

#include <algorithm>
#include <map>
#include <optional>
#include <ostream>
#include <string_view>
#include <utility>
#include <vector>

namespace epd::ctl {
namespace {

// KEY=VALUE. The value "unset" takes back what was set.
struct Setting {
  std::string key;
  std::string text;
  std::optional<std::int64_t> number;

  bool unset() const { return text == "unset"; }
};

std::optional<std::int64_t> parse_number(std::string_view text) {
  const bool negative = text.starts_with('-');
  const std::optional<std::uint64_t> size = parse_whole(text.substr(negative ? 1 : 0));
  if (!size || *size > std::uint64_t{INT64_MAX}) return std::nullopt;
  return negative ? -static_cast<std::int64_t>(*size) : static_cast<std::int64_t>(*size);
}

std::optional<Setting> parse(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0) return std::nullopt;
  const std::string_view value = text.substr(equals + 1);
  return Setting{std::string(text.substr(0, equals)), std::string(value), parse_number(value)};
}

Exit wrong(const Arguments& arguments, Output& output, const std::string& what, const std::string& allowed) {
  return report(arguments, output, {Exit::kUsage, "INVALID_ARGUMENT", what + "; allowed: " + allowed});
}

bool fits_count(const std::optional<std::int64_t>& value) {
  return value && *value >= 0 && *value <= std::int64_t{UINT32_MAX};
}
bool fits_priority(const std::optional<std::int64_t>& value) {
  return value && *value >= INT32_MIN && *value <= INT32_MAX;
}

// The settings that a request has, each with the values that it may have. Only the daemon knows how many SMs
// there are.
using Allowed = std::vector<std::pair<std::string, std::string>>;

Allowed allowed_in(const v1::SetDeviceRequest& /*request*/) {
  return {{"sms", "a number of SMs"}};
}
Allowed allowed_in(const v1::SetGroupRequest& /*request*/) {
  return {{"sms", "a number of SMs"},
          {"priority", std::to_string(abi::kMinPriority) + ".." + std::to_string(abi::kMaxPriority)},
          {"linger_us", "0.." + std::to_string(abi::kMaxLingerUs)}};
}

// False: the message can't carry the value. The daemon judges the others.
bool put(const Setting& setting, v1::SetDeviceRequest& request) {
  if (setting.unset()) {
    request.set_unset_sms(true);
    return true;
  }
  if (!fits_count(setting.number)) return false;
  request.set_sms(static_cast<std::uint32_t>(*setting.number));
  return true;
}
bool put(const Setting& setting, v1::SetGroupRequest& request) {
  if (setting.key == "sms" && setting.unset()) {
    request.set_unset_sms(true);
  } else if (setting.key == "priority" && setting.unset()) {
    request.set_unset_priority(true);
  } else if (setting.key == "linger_us" && setting.unset()) {
    request.set_unset_linger_us(true);
  } else if (setting.key == "sms" && fits_count(setting.number)) {
    request.set_sms(static_cast<std::uint32_t>(*setting.number));
  } else if (setting.key == "priority" && fits_priority(setting.number)) {
    request.set_priority(static_cast<std::int32_t>(*setting.number));
  } else if (setting.key == "linger_us" && fits_count(setting.number)) {
    request.set_linger_us(static_cast<std::uint32_t>(*setting.number));
  } else {
    return false;
  }
  return true;
}

Exit done(const Arguments& arguments, Output& output, const Json& document, const std::string& text) {
  if (arguments.json) {
    write_json(output, document);
  } else {
    output.out << printable(text) << '\n';
  }
  return Exit::kOk;
}

// The values before a change, found by what the answer says was changed. A value that is not known is "".
struct Before {
  std::map<std::string, std::string> values;
  bool spans_nodes = false;  // the group has ranks that this daemon does not serve
};

v1::ListDevicesResponse look(const v1::SetDeviceRequest& /*request*/, Connection& connection) {
  v1::ListDevicesResponse list;
  (void)connection.call(v1::ListDevicesRequest(), list);  // without it the old values are not told
  return list;
}
v1::ListGroupsResponse look(const v1::SetGroupRequest& /*request*/, Connection& connection) {
  v1::ListGroupsResponse list;
  (void)connection.call(v1::ListGroupsRequest(), list);
  return list;
}

Before find(const v1::ListDevicesResponse& list, const v1::SetDeviceRequest& request,
            const v1::SetDeviceResponse& /*response*/) {
  Before before;
  for (const v1::Device& device : list.devices()) {
    if (device.name() == request.device()) before.values["sms"] = std::to_string(device.sms());
  }
  return before;
}
Before find(const v1::ListGroupsResponse& list, const v1::SetGroupRequest& /*request*/,
            const v1::SetGroupResponse& response) {
  Before before;
  for (const v1::Group& group : list.groups()) {
    if (group.group_id() != response.group_id()) continue;
    before.values["sms"] = std::to_string(group.sms());
    before.values["priority"] = std::to_string(group.priority());
    before.values["linger_us"] = std::to_string(group.linger_us());
    before.spans_nodes = group.shape().span() == v1::SPAN_CLUSTER;
  }
  return before;
}

// "group 3 (layer-experts)"
template <typename Response>
std::string group_in(const Response& response) {
  return "group " + std::to_string(response.group_id()) + " (" + response.name() + ")";
}

std::string changed(const Arguments& arguments, const v1::SetDeviceResponse& /*response*/,
                    Json& /*document*/) {
  return arguments.target;
}
std::string changed(const Arguments& /*arguments*/, const v1::SetGroupResponse& response, Json& document) {
  document["group_id"] = response.group_id();
  document["name"] = response.name();
  return group_in(response);
}

template <typename Request, typename Response>
Exit set(const Arguments& arguments, Connection& connection, Output& output, Request request) {
  const Allowed allowed = allowed_in(request);
  Json document;
  std::vector<Setting> settings;
  for (const std::string& text : arguments.settings) {
    const std::optional<Setting> setting = parse(text);
    const auto values = std::find_if(allowed.begin(), allowed.end(), [&](const auto& known) {
      return setting && known.first == setting->key;
    });
    if (values == allowed.end()) {
      std::string forms;
      for (const auto& [key, range] : allowed) forms += key + "=NUMBER, ";
      return wrong(arguments, output, "setting \"" + text + "\" is not understood", forms + "or =unset");
    }
    if (!put(*setting, request))
      return wrong(arguments, output, setting->key + " is \"" + setting->text + "\"",
                   values->second + ", or unset");
    if (document["set"].contains(setting->key))
      return wrong(arguments, output, "setting \"" + setting->key + "\" is given twice", "once");
    document["set"][setting->key] = setting->number ? Json(*setting->number) : Json(nullptr);
    settings.push_back(*setting);
  }
  const auto list = look(request, connection);
  Response response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  Before before = find(list, request, response);
  std::string words;
  for (const Setting& setting : settings) {
    const std::string was = before.values[setting.key];
    words +=
        (words.empty() ? " " : ", ") + setting.key + (was.empty() ? "" : " " + was) + " -> " + setting.text;
  }
  document["target"] = arguments.target;
  if (before.spans_nodes) {
    document["this_node_only"] = true;
    words += " for its ranks on this node; those on other nodes keep theirs";
  }
  const std::string what = changed(arguments, response, document);
  return done(arguments, output, document, what + ":" + words);
}

std::string text_of(const google::protobuf::RepeatedPtrField<v1::OptionChange>& changes) {
  std::string text;
  for (const v1::OptionChange& change : changes) {
    const auto shown = [](const std::string& value) { return value.empty() ? "\"\"" : printable(value); };
    text += "  " + printable(change.key()) + ": " + shown(change.before()) + " -> " + shown(change.after()) +
            "\n";
  }
  return text;
}

// Refuses the first setting whose key is no option of the section, as the daemon's own configuration has it.
std::optional<Failure> check_keys(const std::vector<Setting>& settings, const std::string& section,
                                  Connection& connection) {
  v1::GetConfigResponse config;
  if (auto failure = connection.call(v1::GetConfigRequest(), config)) return failure;
  std::string names;
  for (const v1::ConfigEntry& entry : config.entries()) {
    if (entry.key().starts_with(section))
      names.append(names.empty() ? "" : ", ").append(printable(entry.key().substr(section.size())));
  }
  for (const Setting& setting : settings) {
    const bool known = std::any_of(config.entries().begin(), config.entries().end(),
                                   [&](const auto& entry) { return entry.key() == section + setting.key; });
    if (!known)
      return Failure{
          Exit::kUsage, "INVALID_ARGUMENT",
          "\"" + printable(setting.key) + "\" is no option of " + section + "*; allowed: " + names};
  }
  return std::nullopt;
}

// `section`: "log." or "limits.". What its options are and allow, the daemon knows.
Exit set_options(const Arguments& arguments, Connection& connection, Output& output,
                 const std::string& section, const std::string& allowed) {
  v1::SetOptionsRequest request;
  std::vector<Setting> settings;
  for (const std::string& text : arguments.settings) {
    const std::optional<Setting> setting = parse(text);
    if (!setting) return wrong(arguments, output, "setting \"" + text + "\" is not understood", allowed);
    const std::string key = section + setting->key;
    const bool twice =
        request.values().contains(key) ||
        std::find(request.unset().begin(), request.unset().end(), key) != request.unset().end();
    if (twice) return wrong(arguments, output, "setting \"" + setting->key + "\" is given twice", "once");
    if (setting->unset()) {
      request.add_unset(key);
    } else {
      (*request.mutable_values())[key] = setting->text;
    }
    settings.push_back(*setting);
  }
  if (auto failure = check_keys(settings, section, connection)) return report(arguments, output, *failure);
  v1::SetOptionsResponse response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  if (arguments.json) {
    write_json(output, to_json(response));
  } else {
    const char* heading = response.changes().empty() ? "it was so already\n"
                          : request.values().empty() ? "unset:\n"
                          : request.unset().empty()  ? "set, until the daemon ends:\n"
                                                     : "set until the daemon ends, or unset:\n";
    output.out << heading << text_of(response.changes());
  }
  return Exit::kOk;
}

}  // namespace

Exit run_reload(const Arguments& arguments, Connection& connection, Output& output) {
  v1::ReloadConfigResponse response;
  if (auto failure = connection.call(v1::ReloadConfigRequest(), response))
    return report(arguments, output, *failure);
  if (arguments.json) {
    write_json(output, to_json(response));
  } else {
    output.out << "configuration reloaded, generation " << response.generation()
               << (response.changes().empty() ? "; nothing changed\n" : ":\n") << text_of(response.changes());
  }
  return Exit::kOk;
}

Exit run_set(const Arguments& arguments, Connection& connection, Output& output) {
  if (arguments.command == Command::kSetLog)
    return set_options(arguments, connection, output, "log.", "level=LEVEL, level=unset");
  if (arguments.command == Command::kSetLimits)
    return set_options(arguments, connection, output, "limits.", "OPTION=VALUE, OPTION=unset");
  if (arguments.command == Command::kSetDevice) {
    v1::SetDeviceRequest request;
    request.set_device(arguments.target);
    return set<v1::SetDeviceRequest, v1::SetDeviceResponse>(arguments, connection, output, request);
  }
  v1::SetGroupRequest request;
  request.set_group(arguments.target);
  return set<v1::SetGroupRequest, v1::SetGroupResponse>(arguments, connection, output, request);
}

Exit run_evict(const Arguments& arguments, Connection& connection, Output& output) {
  Json document;
  if (arguments.command == Command::kEvictSession) {
    v1::EvictSessionRequest request;
    request.set_session_id(arguments.session_id);
    request.set_reason(arguments.reason);
    v1::EvictSessionResponse response;
    if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
    document["evicted"] = {{"session_id", arguments.session_id}};
    return done(arguments, output, document, "session " + std::to_string(arguments.session_id) + " evicted");
  }
  v1::EvictRankRequest request;
  request.set_group(arguments.target);
  request.set_rank(arguments.rank);
  request.set_reason(arguments.reason);
  v1::EvictRankResponse response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  document["evicted"] = {{"group", arguments.target},
                         {"group_id", response.group_id()},
                         {"name", response.name()},
                         {"rank", arguments.rank}};
  return done(arguments, output, document,
              "rank " + std::to_string(arguments.rank) + " of " + group_in(response) + " evicted");
}

Exit run_restart(const Arguments& arguments, Connection& connection, Output& output) {
  v1::RestartDeviceRequest request;
  request.set_device(arguments.target);
  v1::RestartDeviceResponse response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  return done(arguments, output, Json{{"restarted", {{"device", arguments.target}}}},
              arguments.target + " restarts");
}

}  // namespace epd::ctl
