// epctl set, reload, evict, restart and drain: the commands with which an operator changes something.
#include "commands.h"
#include "format.h"
#include "proto/shape.h"
#include "socket.h"

#include <google/protobuf/descriptor.h>
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace epd::ctl {

// ---- change

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

// All settings of the command line. `allowed` shows the form of one.
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

// Sets a device or a group. `look` asks for the values before. `find` finds in the answer the object that was
// set, or null.
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

// `section` is "log." or "limits.". The daemon knows which options it has and what they allow.
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
  const char* heading = response.changes().empty() ? "nothing changed\n"
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

// ---- drain

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPoll(100);
constexpr milliseconds kMargin(10'000);   // beyond the sessions' time
constexpr milliseconds kMayClose(2'000);  // between the close of a socket and its removal

// Answers of the daemon while it drains. Its state is unknown when it no longer answers in full.
enum class Seen { kDraining, kGone, kStuck };

Seen look(Connection& connection, const std::string& boot_id, v1::GetStatusResponse& status) {
  const auto failure = connection.try_call(v1::GetStatusRequest(), status);
  // Another boot id means a new daemon on the same socket.
  if (!failure) return status.daemon().boot_id() == boot_id ? Seen::kDraining : Seen::kGone;
  if (failure->exit == Exit::kRefused) return Seen::kDraining;
  const bool answers_late = failure->status == "DEADLINE_EXCEEDED" || failure->status == "RESOURCE_EXHAUSTED";
  return answers_late ? Seen::kStuck : Seen::kGone;
}

enum class End { kOrderly, kDied, kLate };

// A daemon that ends as it should removes its socket just after it has closed it.
bool leaves_its_socket(const std::string& path, milliseconds patience) {
  const auto give_up = steady_clock::now() + patience;
  while (is_stale(path)) {
    if (steady_clock::now() >= give_up) return true;
    std::this_thread::sleep_for(kPoll);
  }
  return false;
}

// How a daemon ended that answers no more.
End end_of(const std::string& socket, const UniqueFd& process, steady_clock::time_point give_up) {
  const bool seen = process.valid();
  if (seen && !wait_for_exit(process, give_up)) return End::kLate;
  return leaves_its_socket(socket, seen ? milliseconds(0) : kMayClose) ? End::kDied : End::kOrderly;
}

End wait_for_end(const Context& context, const std::string& boot_id, const UniqueFd& process,
                 milliseconds time) {
  const auto give_up = steady_clock::now() + time + kMargin;
  std::uint64_t told = ~std::uint64_t{0};
  while (steady_clock::now() < give_up) {
    v1::GetStatusResponse status;
    const Seen seen = look(context.connection, boot_id, status);
    if (seen == Seen::kGone) return end_of(context.arguments.socket, process, give_up);
    if (seen == Seen::kDraining && status.has_daemon() && status.daemon().sessions() != told) {
      told = status.daemon().sessions();
      if (!context.arguments.json && told != 0)
        context.output.error << "waiting for " << counted(told, "session") << '\n';
    }
    std::this_thread::sleep_for(kPoll);
  }
  return End::kLate;
}

}  // namespace

Exit run_drain(const Context& context) {
  // The status is read first, because an idle daemon may exit before it can answer again.
  const auto before = context.connection.call<v1::GetStatusResponse>(v1::GetStatusRequest());
  const UniqueFd process = context.arguments.wait
                               ? listening_process(context.arguments.socket, before.daemon().pid())
                               : UniqueFd();
  v1::DrainRequest request;
  request.set_timeout_ms(context.arguments.drain_ms);
  const auto response = context.connection.call<v1::DrainResponse>(request);

  Json document = to_json(response);
  const v1::DaemonStatus& daemon = response.has_daemon() ? response.daemon() : before.daemon();
  const milliseconds time(daemon.drain_left_ms());  // none: it leaves already
  if (!context.arguments.json) {
    context.output.out << "draining: "
                       << (daemon.sessions() == 0
                               ? "no sessions"
                               : counted(daemon.sessions(), "session") + " may finish within " +
                                     format_ms(daemon.drain_left_ms()))
                       << std::endl;
  }
  if (!context.arguments.wait) return context.answer(document, "");
  const auto start = steady_clock::now();
  const End end = wait_for_end(context, before.daemon().boot_id(), process, time);
  const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start).count();
  const std::string waited_text = format_ms(static_cast<std::uint64_t>(waited));
  const std::string name = "the daemon (pid " + std::to_string(before.daemon().pid()) + ")";
  if (end == End::kDied)
    throw Failure{Exit::kUnreachable, "DAEMON_LOST",
                  name + " has died before its end: its socket is left behind; see its log"};
  if (end == End::kLate)
    throw Failure{Exit::kRefused, "DEADLINE_EXCEEDED",
                  name + " still runs after " + waited_text + "; see its log and: epctl sessions"};
  document["gone"] = true;
  document["waited_ms"] = waited;
  return context.answer(document, "the daemon has gone after " + waited_text + "\n");
}

}  // namespace epd::ctl
