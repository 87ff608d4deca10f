// epctl set, evict and restart: what an operator changes.
#include "commands.h"
#include "numbers.h"
#include "table.h"

#include <optional>
#include <ostream>
#include <string_view>

namespace epd::ctl {
namespace {

struct Setting {
  std::string key;
  std::int64_t value = 0;
};

std::optional<Setting> parse(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0) return std::nullopt;
  Setting setting{std::string(text.substr(0, equals)), 0};
  const std::string_view value = text.substr(equals + 1);
  const bool negative = value.starts_with('-');
  const std::optional<std::uint64_t> size = parse_whole(value.substr(negative ? 1 : 0));
  if (!size || *size > std::uint64_t{INT64_MAX}) return std::nullopt;
  setting.value = negative ? -static_cast<std::int64_t>(*size) : static_cast<std::int64_t>(*size);
  return setting;
}

Exit wrong(const Arguments& arguments, Output& output, const std::string& what, const std::string& allowed) {
  return report(arguments, output, {Exit::kUsage, "INVALID_ARGUMENT", what + "; allowed: " + allowed});
}

bool fits_sms(std::int64_t value) {
  return value >= 0 && value <= std::int64_t{UINT32_MAX};
}
bool fits_priority(std::int64_t value) {
  return value >= INT32_MIN && value <= INT32_MAX;
}

// The daemon knows what is allowed; here only what a message can carry.
bool put(const Setting& setting, v1::SetDeviceRequest& request) {
  if (setting.key != "sms" || !fits_sms(setting.value)) return false;
  request.set_sms(static_cast<std::uint32_t>(setting.value));
  return true;
}
bool put(const Setting& setting, v1::SetGroupRequest& request) {
  if (setting.key == "sms" && fits_sms(setting.value)) {
    request.set_sms(static_cast<std::uint32_t>(setting.value));
  } else if (setting.key == "priority" && fits_priority(setting.value)) {
    request.set_priority(static_cast<std::int32_t>(setting.value));
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

template <typename Request, typename Response>
Exit set(const Arguments& arguments, Connection& connection, Output& output, Request request,
         const std::string& allowed) {
  Json document;
  std::string words;
  for (const std::string& text : arguments.settings) {
    const std::optional<Setting> setting = parse(text);
    if (!setting || !put(*setting, request))
      return wrong(arguments, output, "setting \"" + text + "\" is not understood", allowed);
    if (document["set"].contains(setting->key))
      return wrong(arguments, output, "setting \"" + setting->key + "\" is given twice", "once");
    document["set"][setting->key] = setting->value;
    words += " " + text;
  }
  Response response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  document["target"] = arguments.target;
  return done(arguments, output, document, arguments.target + ":" + words);
}

}  // namespace

Exit run_set(const Arguments& arguments, Connection& connection, Output& output) {
  if (arguments.command == Command::kSetDevice) {
    v1::SetDeviceRequest request;
    request.set_device(arguments.target);
    return set<v1::SetDeviceRequest, v1::SetDeviceResponse>(arguments, connection, output, request,
                                                            "sms=NUMBER");
  }
  v1::SetGroupRequest request;
  request.set_group(arguments.target);
  return set<v1::SetGroupRequest, v1::SetGroupResponse>(arguments, connection, output, request,
                                                        "sms=NUMBER, priority=NUMBER");
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
  document["evicted"] = {{"group", arguments.target}, {"rank", arguments.rank}};
  return done(arguments, output, document,
              "rank " + std::to_string(arguments.rank) + " of group " + arguments.target + " evicted");
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
