#include "render.h"

#include "format.h"
#include "socket.h"

#include <ctime>

namespace epd::ctl {
namespace {

constexpr Align kLeft = Align::kLeft;
constexpr Align kRight = Align::kRight;

// A "*" marks what an operator has set.
std::string marked(const std::string& value, bool set) {
  return value + (set ? "*" : "");
}

template <typename Message>
std::string user_of(const Message& message) {
  return user_name(message.uid());
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

std::string device_table(const google::protobuf::RepeatedPtrField<v1::Device>& devices) {
  return table_of(
             devices,
             {{"DEVICE", "name"},
              {"STATE", "state"},
              {"ENGINE", "engine_pid"},
              {"SMS", [](const auto& d) { return marked(std::to_string(d.sms()), d.sms_set()); }, kRight},
              {"SESSIONS", "sessions"},
              {"OPS DONE", "ops_completed"},
              {"FAILED", "ops_failed"},
              {"DISPATCHED", "bytes_dispatched"},
              {"COMBINED", "bytes_combined"},
              {"HEARTBEAT", heartbeat, kRight},
              {"RESTARTS", "restarts"},
              {"LAST EXIT", "last_exit"}})
      .text("no devices\n");
}

// "" if there are only host devices.
std::string gpu_table(const google::protobuf::RepeatedPtrField<v1::Device>& devices) {
  std::vector<v1::Device> gpus;
  for (const v1::Device& device : devices) {
    if (device.has_cuda()) gpus.push_back(device);
  }
  const Table table = table_of(
      gpus, {{"GPU", "name"},
             {"MODEL", "cuda.model"},
             {"COMPUTE", "cuda.compute_capability"},
             {"CUDA", "cuda.cuda_version"},
             {"SMS", "cuda.num_sms"},
             {"MPS", [](const auto& d) { return d.cuda().mps() ? "on" : "off: takes turns"; }, kLeft},
             {"STUCK", "times_stuck"},
             {"NO P2P WITH", "cuda.unreachable"}});
  return table.empty() ? "" : "\n" + table.text();
}

// A line of epctl status; "" if there is no value.
std::string fact(std::string name, const std::string& value) {
  if (value.empty()) return "";
  name.resize(16, ' ');
  return "  " + name + printable(value) + "\n";
}

// Tells when the certificate that this node uses expires; "" without one.
std::string expiry_of(const v1::ClusterStatus& cluster) {
  if (cluster.certificate_expires_unix_s() == 0) return "";
  const std::int64_t seconds = cluster.certificate_expires_unix_s() - std::time(nullptr);
  return "expires in " + std::to_string(seconds / 86'400) + " days";
}

std::string without_coordinator(const v1::ClusterStatus& cluster) {
  return cluster.problem().empty() ? "" : "for " + format_ms(cluster.problem_ms());
}

constexpr const char* kInsecure = "plain text between daemons, and nobody is authenticated";

// The lines of epctl status about the daemon's place in its cluster.
std::string cluster_lines(const v1::ClusterStatus& cluster) {
  std::string counts;
  for (const auto& [count, state] : {std::pair(cluster.nodes_up(), "up"),
                                     {cluster.nodes_draining(), "draining"},
                                     {cluster.nodes_silent(), "silent"},
                                     {cluster.nodes_lost(), "lost"},
                                     {cluster.nodes_unknown(), "unknown"}}) {
    if (count != 0) append(counts, std::to_string(count) + " " + state);
  }
  const std::string away = without_coordinator(cluster);
  return fact("cluster", cluster.name() + ", this is " + cluster.node() +
                             (cluster.coordinates() ? ", the coordinator"
                                                    : ", coordinator at " + cluster.coordinator()) +
                             (counts.empty() ? "" : "; " + counts)) +
         fact("no coordinator", away.empty() ? "" : away + ": " + cluster.problem()) +
         fact("certificate", expiry_of(cluster)) +
         fact("INSECURE", cluster.insecure() ? std::string("cluster.insecure: ") + kInsecure : "");
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

std::string copies_of(const v1::GroupMember& member) {
  std::uint64_t all = 0;
  std::uint64_t copied = 0;
  std::string reasons;
  for (const v1::RowCount& count : member.rows()) {
    all += count.times();
    if (count.where() == "in_place") continue;
    copied += count.times();
    reasons += (reasons.empty() ? "" : ", ") + printable(count.where()) + " " + std::to_string(count.times());
  }
  if (copied == 0) return "";
  return "copied " + std::to_string(copied) + " of " + std::to_string(all) + " (" + reasons + ")";
}

// Says which regions lie in the client's own memory.
std::string memory_of(const v1::GroupMember& member) {
  std::string text;
  if (member.registered_bytes() != 0) text += format_bytes(member.registered_bytes()) + " mapped";
  if (const std::string copied = copies_of(member); !copied.empty())
    text += (text.empty() ? "" : "; ") + copied;
  return text.empty() ? "arena" : text;
}

// The payloads of all row formats.
std::string payloads(const v1::Group& group) {
  std::string text = word(group.shape().payload());
  for (const v1::RowFormat& more : group.shape().more_formats()) text += "," + word(more.payload());
  return text;
}

// A rank on another node has a session of that node's, about which this daemon knows nothing.
bool is_far(const v1::GroupMember& member) {
  return !member.node().empty();
}

std::string member_table(const v1::ListGroupsResponse& groups) {
  std::vector<v1::Group> rows;  // with one member each
  for (const v1::Group& group : groups.groups()) {
    for (const v1::GroupMember& member : group.members()) {
      rows.emplace_back().set_group_id(group.group_id());
      *rows.back().add_members() = member;
    }
  }
  const auto member = [](auto text) {
    return [text](const v1::Group& row) { return std::string(text(row.members(0))); };
  };
  const Table table = table_of(
      rows, {{"GROUP", "group_id"},
             {"RANK", member([](const auto& m) { return std::to_string(m.rank()); }), kRight},
             {"SESSION",
              member([](const auto& m) { return is_far(m) ? "" : std::to_string(m.session_id()); }), kRight},
             {"NODE", member([](const auto& m) { return is_far(m) ? m.node() : "own"; }), kLeft},
             {"DEVICE", member([](const auto& m) { return m.device(); }), kLeft},
             {"STATE", member(state_of), kLeft},
             {"MEMORY", member([](const auto& m) { return is_far(m) ? "" : memory_of(m); }), kLeft}});
  return table.empty() ? "" : "\n" + table.text();
}

std::string notes_of(const v1::Group& group) {
  const std::string name =
      "group " + std::to_string(group.group_id()) + " (" + printable(group.name()) + "): ";
  std::string notes;
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
  return notes;
}

}  // namespace

std::string render(const v1::GetStatusResponse& status) {
  const v1::DaemonStatus& daemon = status.daemon();
  std::string text = "epd " + printable(daemon.version()) + "  " + word(daemon.state()) + "  pid " +
                     std::to_string(daemon.pid()) + "  up " + format_ms(daemon.uptime_ms()) + "\n";
  const auto failed = [](const std::string& before, const std::string& problem, const char* behind) {
    return problem.empty() ? "" : before + problem + behind;
  };
  const bool lost = daemon.log_lines_lost() != 0 || !daemon.log_problem().empty();
  text +=
      fact("attach socket", daemon.socket_path()) + fact("control socket", daemon.control_path()) +
      fact("PROBLEM", failed("", daemon.socket_problem(), "; restart epd")) +
      fact("sessions", std::to_string(daemon.sessions()) + " (" + std::to_string(daemon.sessions_total()) +
                           " since start, " + std::to_string(daemon.sessions_refused()) + " refused)") +
      fact("groups", std::to_string(daemon.groups())) + fact("arenas", format_bytes(daemon.arena_bytes())) +
      fact("configuration", "generation " + std::to_string(daemon.config_generation())) +
      fact("last reload", failed("refused: ", daemon.last_reload_error(), "")) +
      fact("log", !lost ? ""
                        : counted(daemon.log_lines_lost(), "line") + " lost" +
                              failed("; ", daemon.log_problem(), ""));
  if (daemon.has_cluster()) text += cluster_lines(daemon.cluster());
  text += fact("boot", daemon.boot_id()) + "\n";
  return text + device_table(status.devices()) + gpu_table(status.devices());
}

std::string render(const v1::ListDevicesResponse& devices) {
  return device_table(devices.devices()) + gpu_table(devices.devices());
}

std::string render(const v1::ListNodesResponse& nodes) {
  const v1::ClusterStatus& cluster = nodes.cluster();
  const auto role = [](const v1::Node& node) {
    return marked(node.coordinator() ? "coordinator" : "", node.own());
  };
  const auto heard = [](const v1::Node& node) {
    return node.has_heartbeat_age_ms() && !node.own() ? format_ms(node.heartbeat_age_ms()) + " ago" : "";
  };
  const Table table =
      table_of(nodes.nodes(), {{"NODE", "name"},
                               {"STATE", "state"},
                               {"SINCE", "since_ms"},
                               {"ROLE", role, kLeft},
                               {"HEARTBEAT", heard, kRight},
                               {"VERSION", "version"},
                               {"ADDRESS", "address"},
                               {"BOOT", [](const auto& n) { return n.boot_id().substr(0, 8); }, kLeft}});
  std::string notes;
  for (const v1::Node& node : nodes.nodes()) {
    if (!node.reason().empty())
      notes += "node " + printable(node.name()) + ": " + printable(node.reason()) + "\n";
  }
  if (const std::string away = without_coordinator(cluster); !away.empty())
    notes += "no coordinator " + away + " (" + printable(cluster.coordinator()) +
             "): " + printable(cluster.problem()) + "\n";
  for (const v1::RefusalCount& refusal : cluster.refusals())
    notes += "refused here (" + printable(refusal.reason()) + "): " + std::to_string(refusal.count()) + "\n";
  if (const std::string expiry = expiry_of(cluster); !expiry.empty())
    notes += "certificate of this node: " + expiry + "\n";
  if (cluster.insecure()) notes += std::string("INSECURE: ") + kInsecure + "\n";
  return table.text() + (notes.empty() ? "" : "\n" + notes);
}

std::string render(const v1::ListSessionsResponse& sessions) {
  return table_of(sessions.sessions(), {{"SESSION", "session_id"},
                                        {"DEVICE", "device"},
                                        {"PID", process, kRight},
                                        {"PROGRAM", "program"},
                                        {"USER", user_of<v1::Session>, kLeft},
                                        {"UID", "uid"},
                                        {"GID", "gid"},
                                        {"GROUPS", "groups"},
                                        {"ARENA", "arena_bytes"},
                                        {"AGE", "age_ms"},
                                        {"LIBRARY", "library"}})
      .text("no sessions\n");
}

std::string render(const v1::ListGroupsResponse& groups, bool members) {
  const auto sms = [](const v1::Group& g) {
    return marked(g.sms() == 0 ? "all" : std::to_string(g.sms()), g.sms_set());
  };
  const auto priority = [](const v1::Group& g) {
    return marked(std::to_string(g.priority()), g.priority_set());
  };
  const auto linger = [](const v1::Group& g) {
    return marked(std::to_string(g.linger_us()), g.linger_us_set());
  };
  const Table table = table_of(groups.groups(), {{"GROUP", "group_id"},
                                                 {"NAME", "name"},
                                                 {"USER", user_of<v1::Group>, kLeft},
                                                 {"STATE", "state"},
                                                 {"SPAN", "shape.span"},
                                                 {"RANKS", "shape.num_ranks"},
                                                 {"SUM RANKS", "shape.sum_ranks"},
                                                 {"EXPERTS", "shape.num_experts"},
                                                 {"TOKENS", "shape.max_tokens"},
                                                 {"HIDDEN", "shape.hidden"},
                                                 {"TOPK", "shape.topk"},
                                                 {"DEPTH", "shape.depth"},
                                                 {"PAYLOAD", payloads, kLeft},
                                                 {"LAYOUT", "shape.layout"},
                                                 {"INDEX", "shape.index_type"},
                                                 {"POLICY", "shape.policy"},
                                                 {"SMS", sms, kRight},
                                                 {"PRIO", priority, kRight},
                                                 {"LINGER US", linger, kRight},
                                                 {"EPOCH", "epoch"},
                                                 {"AGE", "age_ms"}});
  if (table.empty()) return "no groups\n";
  std::string notes;
  for (const v1::Group& group : groups.groups()) notes += notes_of(group);
  return table.text() + (notes.empty() ? "" : "\n" + notes) + (members ? member_table(groups) : "");
}

std::string render(const v1::ListOperationsResponse& operations) {
  const auto tokens = [](const v1::Operation& operation) {
    return operation.op() == v1::OPERATION_KIND_DISPATCH ? std::to_string(operation.num_tokens()) : "";
  };
  return table_of(operations.operations(), {{"ID", "id"},
                                            {"GROUP", "group_id"},
                                            {"OP", "op_index"},
                                            {"KIND", "op"},
                                            {"RANK", "rank"},
                                            {"DEVICE", "device"},
                                            {"SESSION", "session_id"},
                                            {"SLOT", "slot"},
                                            {"TOKENS", tokens, kRight},
                                            {"STAGE", "stage"},
                                            {"WAITS FOR", wait_of, kLeft},
                                            {"AGE", "age_us"}})
      .text("no operations in flight\n");
}

std::string render(const v1::GetConfigResponse& config) {
  return table_of(config.entries(),
                  {{"KEY", "key"}, {"VALUE", "value"}, {"FROM", "origin"}, {"RELOADABLE", "reloadable"}})
      .text("no options\n");
}

}  // namespace epd::ctl
