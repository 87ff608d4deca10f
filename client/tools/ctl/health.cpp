// epctl health: what serves, as grpc.health.v1 tells it, with an exit status for probes.
#include "commands.h"
#include "table.h"

#include <ostream>
#include <string>
#include <vector>

namespace epd::ctl {
namespace {

struct Part {
  std::string name;
  bool serving = false;
};

std::optional<Failure> check(Connection& connection, Part& part) {
  return connection.check_health(part.name, part.serving);
}

// The daemon as a whole first.
std::optional<Failure> check_all(Connection& connection, std::vector<Part>& parts) {
  for (const char* name : {"daemon", "control", "membership"}) {
    Part part{name};
    if (auto failure = check(connection, part)) return failure;
    parts.push_back(part);
  }
  Part cluster{"cluster"};
  const auto failure = check(connection, cluster);
  if (failure && failure->status != "NOT_FOUND") return failure;
  if (!failure) parts.push_back(cluster);
  v1::ListDevicesResponse devices;
  if (auto refused = connection.call(v1::ListDevicesRequest(), devices)) return refused;
  for (const v1::Device& device : devices.devices()) {
    Part part{"device/" + device.name()};
    if (auto refused = check(connection, part)) return refused;
    parts.push_back(part);
  }
  return std::nullopt;
}

Json to_json(const Part& part) {
  return {{"name", part.name}, {"serving", part.serving}};
}

}  // namespace

Exit run_health(const Arguments& arguments, Connection& connection, Output& output) {
  std::vector<Part> parts;
  std::optional<Failure> failure;
  if (arguments.subsystem.empty()) {
    failure = check_all(connection, parts);
  } else {
    parts.push_back({arguments.subsystem});
    failure = check(connection, parts.front());
  }
  if (failure) return report(arguments, output, *failure);
  if (arguments.json) {
    Json document = {{"serving", parts.front().serving}, {"subsystems", Json::array()}};
    for (const Part& part : parts) document["subsystems"].push_back(to_json(part));
    write_json(output, document);
  } else {
    Table table({{"SUBSYSTEM"}, {"HEALTH"}});
    for (const Part& part : parts) table.add({part.name, part.serving ? "serving" : "NOT SERVING"});
    output.out << table.text();
  }
  return parts.front().serving ? Exit::kOk : Exit::kProblems;
}

}  // namespace epd::ctl
