// epctl set, reload, evict and restart: what an operator changes.
#include "commands.h"
#include "proto/shape.h"
#include "text.h"

#include <google/protobuf/descriptor.h>
#include <algorithm>
#include <map>
#include <optional>
#include <ostream>
#include <string_view>
#include <vector>

namespace epd::ctl {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// KEY=VALUE. The value "unset" takes back what was set.
struct Setting {
  std::string key;
  std::string text;

  bool unset() const { return text == "unset"; }
  std::optional<std::int64_t> number() const {
    const bool negative = text.starts_with('-');
    const std::optional<std::uint64_t> size = parse_whole(std::string_view(text).substr(negative ? 1 : 0));
    if (!size || *size > std::uint64_t{INT64_MAX}) return std::nullopt;
    return negative ? -static_cast<std::int64_t>(*size) : static_cast<std::int64_t>(*size);
  }
};

// All settings of the command line. `allowed`: what one looks like.
std::vector<Setting> parse_settings(const Context& context, const std::string& allowed) {
  std::vector<Setting> settings;
  for (const std::string& text : context.arguments.settings) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      fail_usage("setting \"" + text + "\" is not understood; allowed: " + allowed);
    Setting setting{text.substr(0, equals), text.substr(equals + 1)};
    for (const Setting& before : settings) {
      if (before.key == setting.key)
        fail_usage("setting \"" + setting.key + "\" is given twice; allowed: once");
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

// A setting is a field of the request that another one, unset_KEY, takes back.
const FieldDescriptor* unset_field(const Message& request, const std::string& key) {
  return request.GetDescriptor()->FindFieldByName("unset_" + key);
}

std::string forms_of(const Message& request) {
  std::string forms;
  for (int i = 0; i < request.GetDescriptor()->field_count(); ++i) {
    const std::string& name = request.GetDescriptor()->field(i)->name();
    if (unset_field(request, name) != nullptr) forms += name + "=NUMBER, ";
  }
  return forms + "or =unset";
}

// The daemon alone knows how many SMs there are.
std::string values_of(const std::string& key) {
  if (key == "priority") return std::to_string(abi::kMinPriority) + ".." + std::to_string(abi::kMaxPriority);
  if (key == "linger_us") return "0.." + std::to_string(abi::kMaxLingerUs);
  return "a number of SMs";
}

// Refuses what the message can't carry. The daemon judges the rest.
void put(const Setting& setting, Message& request) {
  const google::protobuf::Reflection& reflection = *request.GetReflection();
  const FieldDescriptor* const unset = unset_field(request, setting.key);
  if (unset == nullptr)
    fail_usage("setting \"" + setting.key + "=" + setting.text +
               "\" is not understood; allowed: " + forms_of(request));
  if (setting.unset()) return reflection.SetBool(&request, unset, true);
  const FieldDescriptor* const field = request.GetDescriptor()->FindFieldByName(setting.key);
  const bool is_signed = field->cpp_type() == FieldDescriptor::CPPTYPE_INT32;
  const std::int64_t least = is_signed ? INT32_MIN : 0;
  const std::int64_t most = is_signed ? std::int64_t{INT32_MAX} : std::int64_t{UINT32_MAX};
  const std::optional<std::int64_t> number = setting.number();
  if (!number || *number < least || *number > most)
    fail_usage(setting.key + " is \"" + setting.text + "\"; allowed: " + values_of(setting.key) +
               ", or unset");
  if (is_signed) {
    reflection.SetInt32(&request, field, static_cast<std::int32_t>(*number));
  } else {
    reflection.SetUInt32(&request, field, static_cast<std::uint32_t>(*number));
  }
}

// Sets a device or a group. `look` asks for what there was before, of which `find` knows the one that was
// set: null if it is not known.
template <typename Response, typename List, typename Find>
Exit set(const Context& context, Message& request, const Message& look, Find find) {
  const std::vector<Setting> settings = parse_settings(context, forms_of(request));
  for (const Setting& setting : settings) put(setting, request);
  List list;
  (void)context.connection.try_call(look, list);  // without it the old values are not told
  const auto response = context.connection.call<Response>(request);
  Json document;
  std::string name = context.arguments.target;
  const Message* const before = find(list, response, name, document);
  std::string words;
  for (const Setting& setting : settings) {
    document["set"][setting.key] = setting.number() ? Json(*setting.number()) : Json(nullptr);
    const std::string was =
        before == nullptr
            ? ""
            : " " + to_json(*before, *before->GetDescriptor()->FindFieldByName(setting.key)).dump();
    append(words, setting.key + was + " -> " + setting.text);
  }
  document["target"] = context.arguments.target;
  if (document.contains("this_node_only"))
    words += " for its ranks on this node; those on other nodes keep theirs";
  return context.answer(document, printable(name + ": " + words) + "\n");
}

// "group 3 (layer-experts)"
template <typename Response>
std::string group_in(const Response& response) {
  return "group " + std::to_string(response.group_id()) + " (" + response.name() + ")";
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
void check_keys(const std::vector<Setting>& settings, const std::string& section, Connection& connection) {
  std::string names;
  const auto config = connection.call<v1::GetConfigResponse>(v1::GetConfigRequest());
  for (const v1::ConfigEntry& entry : config.entries()) {
    if (entry.key().starts_with(section)) append(names, printable(entry.key().substr(section.size())));
  }
  for (const Setting& setting : settings) {
    const bool known = std::any_of(config.entries().begin(), config.entries().end(),
                                   [&](const auto& entry) { return entry.key() == section + setting.key; });
    if (!known)
      fail_usage("\"" + printable(setting.key) + "\" is no option of " + section + "*; allowed: " + names);
  }
}

// `section`: "log." or "limits.". What its options are and allow, the daemon knows.
Exit set_options(const Context& context, const std::string& section, const std::string& allowed) {
  v1::SetOptionsRequest request;
  const std::vector<Setting> settings = parse_settings(context, allowed);
  for (const Setting& setting : settings) {
    if (setting.unset()) {
      request.add_unset(section + setting.key);
    } else {
      (*request.mutable_values())[section + setting.key] = setting.text;
    }
  }
  check_keys(settings, section, context.connection);
  const auto response = context.connection.call<v1::SetOptionsResponse>(request);
  const char* heading = response.changes().empty() ? "it was so already\n"
                        : request.values().empty() ? "unset:\n"
                        : request.unset().empty()  ? "set, until the daemon ends:\n"
                                                   : "set until the daemon ends, or unset:\n";
  return context.answer(to_json(response), heading + text_of(response.changes()));
}

}  // namespace

Exit run_set_device(const Context& context) {
  v1::SetDeviceRequest request;
  request.set_device(context.arguments.target);
  return set<v1::SetDeviceResponse, v1::ListDevicesResponse>(
      context, request, v1::ListDevicesRequest(),
      [](const auto& list, const auto& /*response*/, const std::string& name, Json&) -> const Message* {
        for (const v1::Device& device : list.devices()) {
          if (device.name() == name) return &device;
        }
        return nullptr;
      });
}

Exit run_set_group(const Context& context) {
  v1::SetGroupRequest request;
  request.set_group(context.arguments.target);
  return set<v1::SetGroupResponse, v1::ListGroupsResponse>(
      context, request, v1::ListGroupsRequest(),
      [](const auto& list, const auto& response, std::string& name, Json& document) -> const Message* {
        document = {{"group_id", response.group_id()}, {"name", response.name()}};
        name = group_in(response);
        for (const v1::Group& group : list.groups()) {
          if (group.group_id() != response.group_id()) continue;
          if (group.shape().span() == v1::SPAN_CLUSTER) document["this_node_only"] = true;
          return &group;
        }
        return nullptr;
      });
}

Exit run_reload(const Context& context) {
  const auto response = context.connection.call<v1::ReloadConfigResponse>(v1::ReloadConfigRequest());
  return context.answer(to_json(response), "configuration reloaded, generation " +
                                               std::to_string(response.generation()) +
                                               (response.changes().empty() ? "; nothing changed\n" : ":\n") +
                                               text_of(response.changes()));
}

Exit run_evict_session(const Context& context) {
  v1::EvictSessionRequest request;
  request.set_session_id(context.arguments.session_id);
  request.set_reason(context.arguments.reason);
  context.connection.call<v1::EvictSessionResponse>(request);
  return context.answer({{"evicted", {{"session_id", request.session_id()}}}},
                        "session " + std::to_string(request.session_id()) + " evicted\n");
}

Exit run_evict_group(const Context& context) {
  v1::EvictRankRequest request;
  request.set_group(context.arguments.target);
  request.set_rank(context.arguments.rank);
  request.set_reason(context.arguments.reason);
  const auto response = context.connection.call<v1::EvictRankResponse>(request);
  const Json evicted = {{"group", request.group()},
                        {"group_id", response.group_id()},
                        {"name", response.name()},
                        {"rank", request.rank()}};
  return context.answer({{"evicted", evicted}}, "rank " + std::to_string(request.rank()) + " of " +
                                                    printable(group_in(response)) + " evicted\n");
}

Exit run_restart_device(const Context& context) {
  v1::RestartDeviceRequest request;
  request.set_device(context.arguments.target);
  context.connection.call<v1::RestartDeviceResponse>(request);
  return context.answer({{"restarted", {{"device", request.device()}}}},
                        printable(request.device()) + " restarts\n");
}

Exit run_set_log(const Context& context) {
  return set_options(context, "log.", "level=LEVEL, level=unset");
}

Exit run_set_limits(const Context& context) {
  return set_options(context, "limits.", "OPTION=VALUE, OPTION=unset");
}

}  // namespace epd::ctl
