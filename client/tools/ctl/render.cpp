#include "render.h"

#include "json.h"
#include "socket_file.h"
#include "table.h"
#include "units.h"

#include <ctime>

namespace epd::ctl {
namespace {

constexpr Align kRight = Align::kRight;

std::string number(std::uint64_t value) {
  return std::to_string(value);
}

// A sleeping engine has no reason to beat.
std::string heartbeat(const v1::Device& device) {
  return device.sleeping() && device.state() != v1::DEVICE_STATE_STOPPED
             ? "sleeping"
             : format_ms(device.heartbeat_age_ms()) + " ago";
}

// A number from another PID namespace is marked, because it is only a claim.
std::string process(const v1::Session& session) {
  if (session.pid() != 0 || session.claimed_pid() == 0) return std::to_string(session.pid());
  return std::to_string(session.claimed_pid()) + "@" + session.claimed_host() + "?";
}

std::string pid(std::int32_t value) {
  return value == 0 ? "" : std::to_string(value);
}

// An operator has set it.
std::string set_mark(bool set) {
  return set ? "*" : "";
}

std::string device_table(const google::protobuf::RepeatedPtrField<v1::Device>& devices) {
  Table table({{"DEVICE"},
               {"STATE"},
               {"ENGINE", kRight},
               {"SMS", kRight},
               {"SESSIONS", kRight},
               {"OPS DONE", kRight},
               {"FAILED", kRight},
               {"DISPATCHED", kRight},
               {"COMBINED", kRight},
               {"HEARTBEAT", kRight},
               {"RESTARTS", kRight},
               {"LAST EXIT"}});
  for (const v1::Device& device : devices) {
    table.add({device.name(), word(device.state()), pid(device.engine_pid()),
               number(device.sms()) + set_mark(device.sms_set()), number(device.sessions()),
               number(device.ops_completed()), number(device.ops_failed()),
               format_bytes(device.bytes_dispatched()), format_bytes(device.bytes_combined()),
               heartbeat(device), number(device.restarts()), device.last_exit()});
  }
  return table.empty() ? "no devices\n" : table.text();
}

// "" if there are only host devices.
std::string gpu_table(const google::protobuf::RepeatedPtrField<v1::Device>& devices) {
  Table table({{"GPU"},
               {"MODEL"},
               {"COMPUTE", kRight},
               {"CUDA", kRight},
               {"SMS", kRight},
               {"MPS"},
               {"STUCK", kRight},
               {"NO P2P WITH"}});
  for (const v1::Device& device : devices) {
    if (!device.has_cuda()) continue;
    const v1::CudaDevice& gpu = device.cuda();
    std::string unreachable;
    for (const std::string& name : gpu.unreachable()) unreachable += (unreachable.empty() ? "" : ", ") + name;
    table.add({device.name(), gpu.model(), gpu.compute_capability(), gpu.cuda_version(),
               number(gpu.num_sms()), gpu.mps() ? "on" : "off: takes turns", number(device.times_stuck()),
               unreachable});
  }
  return table.empty() ? "" : "\n" + table.text();
}

// Tells when the certificate that this node uses expires.
std::string expiry_of(const v1::ClusterStatus& cluster) {
  const std::int64_t seconds = cluster.certificate_expires_unix_s() - std::time(nullptr);
  return "expires in " + std::to_string(seconds / 86'400) + " days";
}

// One line, or two: what the daemon's place in its cluster is.
std::string cluster_lines(const v1::ClusterStatus& cluster) {
  std::string text =
      "  cluster         " + printable(cluster.name()) + ", this is " + printable(cluster.node());
  text +=
      cluster.coordinates() ? ", the coordinator" : ", coordinator at " + printable(cluster.coordinator());
  std::string counts;
  for (const auto& [count, state] : {std::pair(cluster.nodes_up(), "up"),
                                     {cluster.nodes_draining(), "draining"},
                                     {cluster.nodes_silent(), "silent"},
                                     {cluster.nodes_lost(), "lost"},
                                     {cluster.nodes_unknown(), "unknown"}}) {
    if (count != 0) counts += (counts.empty() ? "; " : ", ") + number(count) + " " + state;
  }
  text += counts + "\n";
  if (!cluster.problem().empty()) {
    text += "  no coordinator  for " + format_ms(cluster.problem_ms()) + ": " + printable(cluster.problem()) +
            "\n";
  }
  if (cluster.certificate_expires_unix_s() != 0) text += "  certificate     " + expiry_of(cluster) + "\n";
  if (cluster.insecure())
    text += "  INSECURE        cluster.insecure: plain text between daemons, and nobody is authenticated\n";
  return text;
}

std::string ranks(const google::protobuf::RepeatedField<std::uint32_t>& missing) {
  constexpr int kShown = 16;
  std::string text;
  for (int i = 0; i < missing.size() && i < kShown; ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(missing[i]);
  if (missing.size() > kShown) text += " and " + std::to_string(missing.size() - kShown) + " more";
  return text;
}

std::string wait_of(const v1::Operation& operation) {
  if (operation.engine_stopped()) return "its engine stands still";
  if (operation.waiting_for() < 0) return operation.far_wait();
  return "rank " + std::to_string(operation.waiting_for()) + " " + format_us(operation.waiting_us());
}

const char* state_of(const v1::GroupMember& member) {
  if (member.gone()) return "gone";
  return member.client_stopped() ? "here, process stopped" : "here";
}

// What lies in memory of the client's own.
std::string memory_of(const v1::GroupMember& member) {
  std::string text;
  for (const std::string& region : member.bound_regions())
    text += (text.empty() ? "own " : ", ") + printable(region);
  if (member.registered_bytes() != 0)
    text += (text.empty() ? "" : "; ") + format_bytes(member.registered_bytes()) + " registered";
  return text.empty() ? "arena" : text;
}

// Of all row formats.
std::string payloads(const v1::GroupShape& shape) {
  std::string text = word(shape.payload());
  for (const v1::RowFormat& more : shape.more_formats()) text += "," + word(more.payload());
  return text;
}

}  // namespace

std::string render(const v1::GetStatusResponse& status) {
  const v1::DaemonStatus& daemon = status.daemon();
  std::string text = "epd " + printable(daemon.version()) + "  " + word(daemon.state()) + "  pid " +
                     std::to_string(daemon.pid()) + "  up " + format_ms(daemon.uptime_ms()) + "\n";
  text += "  attach socket   " + printable(daemon.socket_path()) + "\n";
  text += "  control socket  " + printable(daemon.control_path()) + "\n";
  if (!daemon.socket_problem().empty())
    text += "  PROBLEM         " + printable(daemon.socket_problem()) + "; restart epd\n";
  text += "  sessions        " + number(daemon.sessions()) + " (" + number(daemon.sessions_total()) +
          " since start, " + number(daemon.sessions_refused()) + " refused)\n";
  text += "  groups          " + number(daemon.groups()) + "\n";
  text += "  arenas          " + format_bytes(daemon.arena_bytes()) + "\n";
  text += "  configuration   generation " + number(daemon.config_generation()) + "\n";
  if (!daemon.last_reload_error().empty()) {
    text += "  last reload     refused: " + printable(daemon.last_reload_error()) + "\n";
  }
  if (daemon.log_lines_lost() != 0 || !daemon.log_problem().empty()) {
    text += "  log             " + counted(daemon.log_lines_lost(), "line") + " lost";
    text += (daemon.log_problem().empty() ? "" : "; " + printable(daemon.log_problem())) + "\n";
  }
  if (daemon.has_cluster()) text += cluster_lines(daemon.cluster());
  text += "  boot            " + printable(daemon.boot_id()) + "\n\n";
  return text + device_table(status.devices()) + gpu_table(status.devices());
}

std::string render(const v1::ListDevicesResponse& devices) {
  return device_table(devices.devices()) + gpu_table(devices.devices());
}

std::string render(const v1::ListNodesResponse& nodes) {
  Table table({{"NODE"},
               {"STATE"},
               {"SINCE", kRight},
               {"ROLE"},
               {"HEARTBEAT", kRight},
               {"VERSION"},
               {"ADDRESS"},
               {"BOOT"}});
  std::string notes;
  for (const v1::Node& node : nodes.nodes()) {
    const std::string role = std::string(node.coordinator() ? "coordinator" : "") + (node.own() ? "*" : "");
    const std::string heartbeat =
        node.has_heartbeat_age_ms() && !node.own() ? format_ms(node.heartbeat_age_ms()) + " ago" : "";
    table.add({node.name(), word(node.state()), format_ms(node.since_ms()), role, heartbeat, node.version(),
               node.address(), node.boot_id().substr(0, 8)});
    if (!node.reason().empty())
      notes += "node " + printable(node.name()) + ": " + printable(node.reason()) + "\n";
  }
  const v1::ClusterStatus& cluster = nodes.cluster();
  if (!cluster.problem().empty()) {
    notes += "no coordinator for " + format_ms(cluster.problem_ms()) + " (" +
             printable(cluster.coordinator()) + "): " + printable(cluster.problem()) + "\n";
  }
  for (const v1::RefusalCount& refusal : cluster.refusals())
    notes += "refused here (" + printable(refusal.reason()) + "): " + number(refusal.count()) + "\n";
  if (cluster.certificate_expires_unix_s() != 0)
    notes += "certificate of this node: " + expiry_of(cluster) + "\n";
  if (cluster.insecure()) notes += "INSECURE: plain text between daemons, and nobody is authenticated\n";
  return table.text() + (notes.empty() ? "" : "\n" + notes);
}

std::string render(const v1::ListSessionsResponse& sessions) {
  Table table({{"SESSION", kRight},
               {"DEVICE"},
               {"PID", kRight},
               {"PROGRAM"},
               {"USER"},
               {"UID", kRight},
               {"GID", kRight},
               {"GROUPS", kRight},
               {"ARENA", kRight},
               {"AGE", kRight},
               {"LIBRARY"}});
  for (const v1::Session& session : sessions.sessions()) {
    table.add({number(session.session_id()), session.device(), process(session), session.program(),
               user_name(session.uid()), number(session.uid()), number(session.gid()),
               number(session.groups()), format_bytes(session.arena_bytes()), format_ms(session.age_ms()),
               session.library()});
  }
  return table.empty() ? "no sessions\n" : table.text();
}

std::string render(const v1::ListGroupsResponse& groups, bool members) {
  Table table({{"GROUP", kRight},
               {"NAME"},
               {"USER"},
               {"STATE"},
               {"SPAN"},
               {"RANKS", kRight},
               {"SUM RANKS", kRight},
               {"EXPERTS", kRight},
               {"TOKENS", kRight},
               {"HIDDEN", kRight},
               {"TOPK", kRight},
               {"DEPTH", kRight},
               {"PAYLOAD"},
               {"LAYOUT"},
               {"INDEX"},
               {"POLICY"},
               {"SMS", kRight},
               {"PRIO", kRight},
               {"LINGER US", kRight},
               {"EPOCH", kRight},
               {"AGE", kRight}});
  Table member_table({{"GROUP", kRight},
                      {"RANK", kRight},
                      {"SESSION", kRight},
                      {"NODE"},
                      {"DEVICE"},
                      {"STATE"},
                      {"MEMORY"}});
  std::string notes;
  for (const v1::Group& group : groups.groups()) {
    const v1::GroupShape& shape = group.shape();
    table.add({number(group.group_id()),
               group.name(),
               user_name(group.uid()),
               word(group.state()),
               word(shape.span()),
               number(shape.num_ranks()),
               number(shape.sum_ranks()),
               number(shape.num_experts()),
               number(shape.max_tokens()),
               number(shape.hidden()),
               number(shape.topk()),
               number(shape.depth()),
               payloads(shape),
               word(shape.layout()),
               word(shape.index_type()),
               word(shape.policy()),
               (group.sms() == 0 ? "all" : number(group.sms())) + set_mark(group.sms_set()),
               std::to_string(group.priority()) + set_mark(group.priority_set()),
               number(group.linger_us()) + set_mark(group.linger_us_set()),
               number(group.epoch()),
               format_ms(group.age_ms())});
    const std::string name = "group " + number(group.group_id()) + " (" + printable(group.name()) + "): ";
    if (group.missing_ranks_size() != 0) {
      notes += name + (group.state() == v1::GROUP_STATE_FORMING ? "waits for " : "goes on without ") +
               counted(static_cast<std::uint64_t>(group.missing_ranks_size()), "rank") + ": " +
               ranks(group.missing_ranks()) + "\n";
    }
    if (group.coordinator_away_ms() != 0) {
      notes += name + "no coordinator for " + format_ms(group.coordinator_away_ms()) +
               "; breaks, joins, leaves and evictions wait for it\n";
    }
    if (!group.cause().empty()) notes += name + "last break: " + printable(group.cause()) + "\n";
    for (const v1::GroupMember& member : group.members()) {
      const bool far = !member.node().empty();  // its session is that node's
      member_table.add({number(group.group_id()), number(member.rank()),
                        far ? "-" : number(member.session_id()), far ? printable(member.node()) : "own",
                        member.device(), state_of(member), far ? "-" : memory_of(member)});
    }
  }
  if (table.empty()) return "no groups\n";
  std::string text = table.text();
  if (!notes.empty()) text += "\n" + notes;
  if (members && !member_table.empty()) text += "\n" + member_table.text();
  return text;
}

std::string render(const v1::ListOperationsResponse& operations) {
  Table table({{"ID"},
               {"GROUP", kRight},
               {"OP", kRight},
               {"KIND"},
               {"RANK", kRight},
               {"DEVICE"},
               {"SESSION", kRight},
               {"SLOT", kRight},
               {"TOKENS", kRight},
               {"STAGE"},
               {"WAITS FOR"},
               {"AGE", kRight}});
  for (const v1::Operation& operation : operations.operations()) {
    table.add({operation.id(), number(operation.group_id()), number(operation.op_index()),
               word(operation.op()), number(operation.rank()), operation.device(),
               number(operation.session_id()), number(operation.slot()),
               operation.op() == v1::OPERATION_KIND_DISPATCH ? number(operation.num_tokens()) : "",
               word(operation.stage()), wait_of(operation), format_us(operation.age_us())});
  }
  return table.empty() ? "no operations in flight\n" : table.text();
}

std::string render(const v1::GetConfigResponse& config) {
  Table table({{"KEY"}, {"VALUE"}, {"FROM"}, {"RELOADABLE"}});
  for (const v1::ConfigEntry& entry : config.entries()) {
    table.add({entry.key(), entry.value(), word(entry.origin()), entry.reloadable() ? "yes" : "no"});
  }
  return table.empty() ? "no options\n" : table.text();
}

}  // namespace epd::ctl
