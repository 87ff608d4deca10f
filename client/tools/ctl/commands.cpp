#include "commands.h"

#include "common/build_info.h"
#include "format.h"
#include "proto/attach.h"
#include "proto/wire.h"
#include "render.h"

#include <array>
#include <cstdio>
#include <map>
#include <ostream>
#include <vector>

namespace epd::ctl {
namespace {

template <typename Response, typename... Options>
Exit show(const Context& context, const google::protobuf::Message& request, const Options&... options) {
  const auto response = context.connection.call<Response>(request);
  return context.answer(to_json(response), context.arguments.json ? "" : render(response, options...));
}

template <typename Request, typename Response>
Exit view(const Context& context) {
  return show<Response>(context, Request());
}

Exit run_groups(const Context& context) {
  return show<v1::ListGroupsResponse>(context, v1::ListGroupsRequest(), context.arguments.members);
}

// Without names rather than without statistics.
using Names = std::map<std::uint64_t, std::string>;
Names names_of_groups(Connection& connection) {
  Names names;
  v1::ListGroupsResponse groups;
  (void)connection.try_call(v1::ListGroupsRequest(), groups);
  for (const v1::Group& group : groups.groups()) names[group.group_id()] = group.name();
  return names;
}

Exit run_stats(const Context& context) {
  return show<v1::GetStatisticsResponse>(
      context, v1::GetStatisticsRequest(), context.arguments.ranks,
      context.arguments.json ? Names() : names_of_groups(context.connection));
}

Exit run_op(const Context& context) {
  v1::GetOperationRequest request;
  request.set_id(context.arguments.operation);
  return show<v1::GetOperationResponse>(context, request);
}

Exit run_waits(const Context& context) {
  v1::GetWaitsRequest request;
  request.set_group(context.arguments.target);
  return show<v1::GetWaitsResponse>(context, request);
}

Exit run_version(const Context& context) {
  const v1::GetVersionResponse own = own_version();
  v1::GetVersionResponse daemon;
  const auto failure = context.connection.try_call(v1::GetVersionRequest(), daemon);
  Json client = to_json(own);
  for (const char* of_daemon : {"boot_id", "cuda_kernels"}) client.erase(of_daemon);
  Json document = {{"client", client}, {"daemon", failure ? Json(nullptr) : to_json(daemon)}};
  if (failure) document["error"] = to_json(*failure)["error"];
  std::vector<v1::GetVersionResponse> sides{own};
  if (!failure) sides.push_back(daemon);
  const auto program = [&](const v1::GetVersionResponse& side) {
    return &side == &sides[0] ? "epctl" : "epd";
  };
  const auto abi = [](const v1::GetVersionResponse& side) {
    const std::string high = std::to_string(side.abi_version_max());
    return side.abi_version_min() == side.abi_version_max()
               ? high
               : std::to_string(side.abi_version_min()) + ".." + high;
  };
  context.answer(document, table_of(sides, {{"PROGRAM", program, Align::kLeft},
                                            {"VERSION", "version"},
                                            {"COMMIT", "commit"},
                                            {"ABI", abi, Align::kLeft},
                                            {"LAYOUT", "layout_hash"},
                                            {"GRPC", "grpc_version"}})
                               .text());
  if (!failure) return Exit::kOk;
  return context.arguments.json ? failure->exit : report(context.arguments, context.output, *failure);
}

// As grpc.health.v1 tells it, the daemon as a whole first.
Exit run_health(const Context& context) {
  std::vector<std::pair<std::string, bool>> parts;
  const auto ask = [&](const std::string& name) {
    parts.emplace_back(name, context.connection.is_serving(name));
  };
  if (context.arguments.subsystem.empty()) {
    for (const char* name : {"daemon", "control", "membership"}) ask(name);
    try {
      ask("cluster");
    } catch (const Failure& failure) {
      if (failure.status != "NOT_FOUND") throw;  // it is in none
    }
    const auto list = context.connection.call<v1::ListDevicesResponse>(v1::ListDevicesRequest());
    for (const v1::Device& device : list.devices()) ask("device/" + device.name());
  } else {
    ask(context.arguments.subsystem);
  }
  const bool serving = parts.front().second;
  Json document = {{"serving", serving}, {"subsystems", Json::array()}};
  Table table({{"SUBSYSTEM"}, {"HEALTH"}});
  for (const auto& [name, serves] : parts) {
    document["subsystems"].push_back({{"name", name}, {"serving", serves}});
    table.add({name, serves ? "serving" : "NOT SERVING"});
  }
  context.answer(document, table.text());
  return serving ? Exit::kOk : Exit::kProblems;
}

using Command = Exit (*)(const Context&);
const std::map<std::string, Command>& commands() {
  static const std::map<std::string, Command> kCommands = {
      {"status", view<v1::GetStatusRequest, v1::GetStatusResponse>},
      {"devices", view<v1::ListDevicesRequest, v1::ListDevicesResponse>},
      {"nodes", view<v1::ListNodesRequest, v1::ListNodesResponse>},
      {"network", view<v1::ListFarEnginesRequest, v1::ListFarEnginesResponse>},
      {"sessions", view<v1::ListSessionsRequest, v1::ListSessionsResponse>},
      {"groups", run_groups},
      {"ops", view<v1::ListOperationsRequest, v1::ListOperationsResponse>},
      {"op", run_op},
      {"stats", run_stats},
      {"waits", run_waits},
      {"watch", run_watch},
      {"events", run_events},
      {"config", view<v1::GetConfigRequest, v1::GetConfigResponse>},
      {"health", run_health},
      {"set device", run_set_device},
      {"set group", run_set_group},
      {"set log", run_set_log},
      {"set limits", run_set_limits},
      {"reload", run_reload},
      {"evict session", run_evict_session},
      {"evict group", run_evict_group},
      {"restart device", run_restart_device},
      {"size", run_size},
      {"drain", run_drain},
      {"doctor", run_doctor},
      {"version", run_version}};
  return kCommands;
}

}  // namespace

Exit run(const Arguments& arguments, Output& output) {
  Connection connection(arguments.socket, arguments.timeout_ms);
  try {
    return commands().at(arguments.command)({arguments, connection, output});
  } catch (const Failure& failure) {
    return report(arguments, output, failure);
  }
}

Json to_json(const Failure& failure) {
  const char* kind = failure.exit == Exit::kUnreachable ? "unreachable"
                     : failure.exit == Exit::kUsage     ? "usage"
                                                        : "refused";
  return {{"error", {{"class", kind}, {"status", failure.status}, {"message", failure.message}}}};
}

Exit Context::answer(const Json& document, const std::string& text) const {
  if (arguments.json) {
    write_json(output, document);
  } else {
    output.out << text;
  }
  return Exit::kOk;
}

void write_json(Output& output, const Json& document) {
  // The document stays valid, whatever a daemon sends.
  output.out << document.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

void write_json_line(Output& output, const Json& document) {
  output.out << document.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

Exit report(const Arguments& arguments, Output& output, const Failure& failure) {
  const bool line_by_line = arguments.command == "events" || arguments.command == "watch";
  if (arguments.json) {
    (line_by_line ? write_json_line : write_json)(output, to_json(failure));
  } else {
    const bool said_by_daemon = failure.exit == Exit::kRefused;
    output.error << "epctl: " << (said_by_daemon ? failure.status + ": " : "") << printable(failure.message)
                 << '\n';
  }
  return failure.exit;
}

v1::GetVersionResponse own_version() {
  std::array<char, 20> hash{};
  std::snprintf(hash.data(), hash.size(), "%016llx", static_cast<unsigned long long>(abi::layout_hash()));
  v1::GetVersionResponse own;
  own.set_version(build_info().version);
  own.set_commit(build_info().commit);
  own.set_abi_version_min(abi::kAbiVersionMin);
  own.set_abi_version_max(abi::kAbiVersion);
  own.set_layout_hash(hash.data());
  own.set_grpc_version(grpc_version());
  return own;
}

void fail_usage(std::string message) {
  throw Failure{Exit::kUsage, "INVALID_ARGUMENT", std::move(message)};
}

}  // namespace epd::ctl
