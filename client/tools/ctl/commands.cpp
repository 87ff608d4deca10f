#include "commands.h"

#include "render.h"
#include "table.h"
#include "versions.h"

#include <map>
#include <ostream>

namespace epd::ctl {
namespace {

template <typename Response, typename Request, typename Render>
Exit ask(const Arguments& arguments, Connection& connection, Output& output, const Request& request,
         Render to_text) {
  Response response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);
  if (arguments.json) {
    write_json(output, to_json(response));
  } else {
    output.out << to_text(response);
  }
  return Exit::kOk;
}

template <typename Request, typename Response, typename Render>
Exit list(const Arguments& arguments, Connection& connection, Output& output, Render to_text) {
  return ask<Response>(arguments, connection, output, Request(), to_text);
}

Exit run_op(const Arguments& arguments, Connection& connection, Output& output) {
  v1::GetOperationRequest request;
  request.set_id(arguments.operation);
  return ask<v1::GetOperationResponse>(arguments, connection, output, request,
                                       [](const auto& r) { return render(r); });
}

Exit run_waits(const Arguments& arguments, Connection& connection, Output& output) {
  v1::GetWaitsRequest request;
  request.set_group(arguments.target);
  return ask<v1::GetWaitsResponse>(arguments, connection, output, request,
                                   [](const auto& r) { return render(r); });
}

// Without names rather than without statistics.
std::map<std::uint64_t, std::string> names_of_groups(Connection& connection) {
  std::map<std::uint64_t, std::string> names;
  v1::ListGroupsResponse groups;
  if (connection.call(v1::ListGroupsRequest(), groups)) return names;
  for (const v1::Group& group : groups.groups()) names[group.group_id()] = group.name();
  return names;
}

std::string version_lines(const OwnVersion& own, const v1::GetVersionResponse* daemon) {
  Table table({{"PROGRAM"}, {"VERSION"}, {"COMMIT"}, {"ABI"}, {"LAYOUT"}, {"GRPC"}});
  const auto abi = [](std::uint32_t low, std::uint32_t high) {
    return low == high ? std::to_string(low) : std::to_string(low) + ".." + std::to_string(high);
  };
  table.add({"epctl", own.version, own.commit, abi(own.abi_version_min, own.abi_version_max), own.layout_hash,
             own.grpc_version});
  if (daemon != nullptr) {
    table.add({"epd", daemon->version(), daemon->commit(),
               abi(daemon->abi_version_min(), daemon->abi_version_max()), daemon->layout_hash(),
               daemon->grpc_version()});
  }
  return table.text();
}

Exit run_version(const Arguments& arguments, Connection& connection, Output& output) {
  const OwnVersion own = own_version();
  v1::GetVersionResponse response;
  const auto failure = connection.call(v1::GetVersionRequest(), response);
  if (!arguments.json) {
    output.out << version_lines(own, failure ? nullptr : &response);
    return failure ? report(arguments, output, *failure) : Exit::kOk;
  }
  Json document;
  document["client"] = {{"version", own.version},
                        {"commit", own.commit},
                        {"abi_version_min", own.abi_version_min},
                        {"abi_version_max", own.abi_version_max},
                        {"layout_hash", own.layout_hash},
                        {"grpc_version", own.grpc_version}};
  document["daemon"] = failure ? Json(nullptr) : to_json(response);
  if (failure) document["error"] = failure_json(*failure)["error"];
  write_json(output, document);
  return failure ? failure->exit : Exit::kOk;
}

}  // namespace

Json failure_json(const Failure& failure) {
  const char* kind = failure.exit == Exit::kUnreachable ? "unreachable"
                     : failure.exit == Exit::kUsage     ? "usage"
                                                        : "refused";
  Json document;
  document["error"] = {{"class", kind}, {"status", failure.status}, {"message", failure.message}};
  return document;
}

void write_json(Output& output, const Json& document) {
  // Whatever a daemon sends, the document stays valid.
  output.out << document.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

void write_json_line(Output& output, const Json& document) {
  output.out << document.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

Exit report(const Arguments& arguments, Output& output, const Failure& failure) {
  const bool line_by_line = arguments.command == Command::kEvents || arguments.command == Command::kWatch;
  if (arguments.json) {
    (line_by_line ? write_json_line : write_json)(output, failure_json(failure));
  } else {
    const bool said_by_daemon = failure.exit == Exit::kRefused;
    output.error << "epctl: " << (said_by_daemon ? failure.status + ": " : "") << printable(failure.message)
                 << '\n';
  }
  return failure.exit;
}

Exit run(const Arguments& arguments, Output& output) {
  Connection connection(arguments.socket, arguments.timeout_ms);
  switch (arguments.command) {
    case Command::kStatus:
      return list<v1::GetStatusRequest, v1::GetStatusResponse>(arguments, connection, output,
                                                               [](const auto& r) { return render(r); });
    case Command::kDevices:
      return list<v1::ListDevicesRequest, v1::ListDevicesResponse>(arguments, connection, output,
                                                                   [](const auto& r) { return render(r); });
    case Command::kNodes:
      return list<v1::ListNodesRequest, v1::ListNodesResponse>(arguments, connection, output,
                                                               [](const auto& r) { return render(r); });
    case Command::kNetwork:
      return list<v1::ListFarEnginesRequest, v1::ListFarEnginesResponse>(
          arguments, connection, output, [](const auto& r) { return render(r); });
    case Command::kSessions:
      return list<v1::ListSessionsRequest, v1::ListSessionsResponse>(arguments, connection, output,
                                                                     [](const auto& r) { return render(r); });
    case Command::kGroups:
      return list<v1::ListGroupsRequest, v1::ListGroupsResponse>(
          arguments, connection, output, [&](const auto& r) { return render(r, arguments.members); });
    case Command::kOps:
      return list<v1::ListOperationsRequest, v1::ListOperationsResponse>(
          arguments, connection, output, [](const auto& r) { return render(r); });
    case Command::kOp: return run_op(arguments, connection, output);
    case Command::kStats:
      return list<v1::GetStatisticsRequest, v1::GetStatisticsResponse>(
          arguments, connection, output,
          [&](const auto& r) { return render(r, arguments.ranks, names_of_groups(connection)); });
    case Command::kWaits: return run_waits(arguments, connection, output);
    case Command::kEvents: return run_events(arguments, connection, output);
    case Command::kWatch: return run_watch(arguments, connection, output);
    case Command::kHealth: return run_health(arguments, connection, output);
    case Command::kReload: return run_reload(arguments, connection, output);
    case Command::kSetDevice:
    case Command::kSetGroup:
    case Command::kSetLog:
    case Command::kSetLimits: return run_set(arguments, connection, output);
    case Command::kEvictSession:
    case Command::kEvictRank: return run_evict(arguments, connection, output);
    case Command::kRestartDevice: return run_restart(arguments, connection, output);
    case Command::kCompletion: break;  // needs no daemon: main
    case Command::kConfig:
      return list<v1::GetConfigRequest, v1::GetConfigResponse>(arguments, connection, output,
                                                               [](const auto& r) { return render(r); });
    case Command::kSize: return run_size(arguments, output);
    case Command::kDrain: return run_drain(arguments, connection, output);
    case Command::kDoctor: return run_doctor(arguments, connection, output);
    case Command::kVersion: return run_version(arguments, connection, output);
  }
  return Exit::kUsage;
}

}  // namespace epd::ctl
