#include "config_table.h"

#include "gpu_list.h"

#include <algorithm>
#include <charconv>
#include <limits>

namespace epd::supervisor {
namespace {

constexpr std::int64_t kDayMs = 86'400'000;
constexpr bool kLive = true;    // reloadable
constexpr bool kFixed = false;  // needs a restart

Option text(const char* key, const char* value, std::string Config::*field, const char* environment,
            const char* help) {
  return {key, value, OptionKind::kText, field, 0, 0, {}, environment, kFixed, help};
}

Option number(const char* key, const char* value, std::uint32_t Config::*field, std::int64_t low,
              std::int64_t high, bool reloadable, const char* help) {
  return {key, value, OptionKind::kNumber, field, low, high, {}, "", reloadable, help};
}

Option bytes(const char* key, const char* value, std::uint64_t Config::*field, const char* help) {
  return {key, value, OptionKind::kBytes, field, 0, kMaxBytes, {}, "", kLive, help};
}

std::vector<Option> make_table() {
  using C = Config;
  return {
      text("daemon.socket", "/run/epd/epd.sock", &C::socket, "EPD_SOCKET",
           "Socket that clients attach to. Its directory is made if it is missing."),
      text("daemon.control_socket", "/run/epd/control.sock", &C::control_socket, "EPD_CONTROL_SOCKET",
           "Socket of the gRPC control plane (epctl)."),
      {"daemon.socket_mode",
       "0660",
       OptionKind::kOctal,
       &C::socket_mode,
       0,
       0777,
       {},
       "",
       kFixed,
       "Permissions of the attach socket, octal. Users who can open it may use the daemon."},
      text("daemon.socket_group", "", &C::socket_group, "",
           "Group that owns the attach socket, by name or number; empty: the group of the daemon."),
      {"daemon.control_socket_mode",
       "0600",
       OptionKind::kOctal,
       &C::control_socket_mode,
       0,
       0777,
       {},
       "",
       kFixed,
       "Permissions of the control socket, octal. Users who can open it are trusted with the daemon's "
       "availability. access.operate says what they may do."},
      text("daemon.control_socket_group", "", &C::control_socket_group, "",
           "Group that owns the control socket, by name or number; empty: the group of the daemon."),
      {"log.level",
       "info",
       OptionKind::kLevels,
       &C::log_level,
       0,
       0,
       {},
       "EPD_LOG_LEVEL",
       kLive,
       "Least important line that is logged, in the daemon and its engines. Rooms of the daemon may have "
       "levels "
       "of their own: info,session=debug,engine=trace."},
      {"log.format",
       "logfmt",
       OptionKind::kChoice,
       &C::log_format,
       0,
       0,
       {"logfmt", "json"},
       "",
       kFixed,
       "Form of log lines, on standard error."},
      {"devices.host",
       "auto",
       OptionKind::kAutoNumber,
       &C::host_devices,
       0,
       64,
       {},
       "",
       kFixed,
       "Number of emulated host devices (host:0, host:1, ...), one engine process each. auto: one if no GPU "
       "is served, else none; where devices.cuda is auto as well and finds no GPU, with a warning. 0: no "
       "start without a GPU."},
      {"devices.cuda",
       "auto",
       OptionKind::kGpus,
       &C::cuda_devices,
       0,
       0,
       {},
       "",
       kFixed,
       "GPUs to serve, one engine process each: a list of numbers, as the driver has them (cuda:0, cuda:1, "
       "...), and UUIDs. auto: all that the machine has."},
      number("devices.sms", "0", &C::device_sms, 0, 1024, kLive,
             "SMs of each device that operations may use (host: worker threads); 0: on a GPU 64, on a host "
             "device "
             "processors / devices, at least 1. A device that has fewer uses all that it has: see epctl "
             "devices."),
      number("devices.linger_us", "0", &C::linger_us, 0, abi::kMaxLingerUs, kLive,
             "How long the SMs of an operation stay for the next one, on a GPU, in microseconds. 0: they are "
             "free at once. Other kernels miss them meanwhile. epctl set group says otherwise for a group."),
      number("limits.max_sessions", "256", &C::max_sessions, 1, 65536, kLive, "Sessions at one time."),
      number(
          "limits.max_sessions_per_user", "0", &C::max_sessions_per_user, 0, 65536, kLive,
          "Sessions of one user at one time; 0: three quarters of limits.max_sessions, so that no user takes "
          "all; all of them for root and the daemon's own user."),
      number("limits.max_groups", "256", &C::max_groups, 1, 65536, kLive, "Groups at one time."),
      number(
          "limits.max_groups_per_user", "0", &C::max_groups_per_user, 0, 65536, kLive,
          "Groups of one user at one time; 0: three quarters of limits.max_groups, all of them for root and "
          "the daemon's own user."),
      bytes("limits.max_arena_bytes", "0", &C::max_arena_bytes,
            "Bytes of all arenas together; 0: 16 times the memory of the machine, or of the daemon's cgroup. "
            "Arenas have worst-case sizes and take memory only where rows have been written, so this counts "
            "promises, not pages. When pages fill that, the user with the most of them loses sessions. "
            "Memory of a GPU is taken at once, so the GPU itself is its limit."),
      bytes(
          "limits.max_arena_bytes_per_user", "0", &C::max_arena_bytes_per_user,
          "The same for one user; 0: three quarters of limits.max_arena_bytes, all of them for root and the "
          "daemon's own user."),
      {"limits.max_priority",
       "7",
       OptionKind::kSigned,
       &C::max_priority,
       abi::kMinPriority,
       abi::kMaxPriority,
       {},
       "",
       kLive,
       "Highest priority with which a rank may join. Operations of a lower one get a small share of their "
       "device "
       "while those of a higher one run."},
      bytes("limits.max_routing_bytes", "0", &C::max_routing_bytes,
            "Bytes that the engines of host devices may take together, beside arenas, for the routings of "
            "dispatches; 0: a quarter of the memory of the machine, or of the daemon's cgroup. A rank is "
            "counted "
            "in the worst case when it joins, by its max_tokens, topk, depth and num_handles."),
      bytes("limits.max_routing_bytes_per_user", "0", &C::max_routing_bytes_per_user,
            "The same for one user; 0: three quarters of limits.max_routing_bytes, all of them for root and "
            "the "
            "daemon's own user."),
      {"access.default",
       "allow",
       OptionKind::kChoice,
       &C::access_default,
       0,
       0,
       {"allow", "deny"},
       "",
       kLive,
       "Whether users whom no [[access.rule]] of the file is about may attach."},
      {"access.operate",
       "read",
       OptionKind::kChoice,
       &C::access_operate,
       0,
       0,
       {"none", "read", "change"},
       "",
       kLive,
       "Rights of users of the control socket, if no [[access.rule]] says operate for them: nothing, look, "
       "or "
       "also drain, set, evict, restart. Root and the daemon's own user may always do everything."},
      number("timeouts.attach_ms", "5000", &C::attach_ms, 1, kDayMs, kLive,
             "How long a connection may take to say who it is."),
      number("timeouts.join_ms", "60000", &C::join_ms, 1, kDayMs, kLive,
             "How long a rank waits for the others to join, if it does not say."),
      number("timeouts.operation_ms", "30000", &C::operation_ms, 1, kDayMs, kLive,
             "Deadline of an operation that gives none."),
      number("timeouts.drain_ms", "10000", &C::drain_ms, 0, kDayMs, kLive,
             "How long sessions may continue after SIGTERM before they are ended."),
      number("timeouts.engine_ack_ms", "3000", &C::engine_ack_ms, 10, kDayMs, kLive,
             "How long an engine may take to answer before it is killed and restarted."),
      number("timeouts.engine_watchdog_ms", "10000", &C::engine_watchdog_ms, 2000, kDayMs, kLive,
             "How long an engine's loop may hang, or its start may take, before it is killed."),
      number("engine.spin_us", "50", &C::spin_us, 0, 1'000'000, kLive,
             "How long an idle engine polls before it sleeps, in microseconds."),
      number("engine.restart_backoff_min_ms", "10", &C::restart_backoff_min_ms, 1, kDayMs, kLive,
             "Pause before an engine that died is started again; doubles with each death in a row."),
      number("engine.restart_backoff_max_ms", "5000", &C::restart_backoff_max_ms, 1, kDayMs, kLive,
             "Longest such pause."),
      number("engine.max_restarts_per_minute", "10", &C::max_restarts_per_minute, 0, 10000, kLive,
             "An engine that dies more often than this in a minute is given up, and its sessions end."),
      text("metrics.listen", "", &C::metrics_listen, "",
           "Address and port of GET /metrics, /healthz and /readyz over HTTP, for anybody who reaches them: "
           "127.0.0.1:9455, [::1]:9455, 0.0.0.0:9455. A port alone is one of 127.0.0.1. Empty: nowhere."),
      number("metrics.max_groups", "64", &C::metrics_max_groups, 1, 1024, kFixed,
             "Groups that have metrics of their own; the rest is told as one, group \"other\"."),
      number("metrics.max_ranks", "16", &C::metrics_max_ranks, 1, 128, kFixed,
             "Ranks of a group that have metrics of their own. A larger group shows those that others "
             "waited for most; the rest is told as one, rank \"other\", and pairs of ranks are not told."),
      text(
          "mps.control", "nvidia-cuda-mps-control", &C::mps_control, "",
          "Program that is asked to terminate a client's or an engine's work on a GPU under MPS before it is "
          "evicted or killed; a path, or to be found in PATH. Empty: nobody is asked."),
      number("mps.timeout_ms", "1000", &C::mps_timeout_ms, 1, 60'000, kFixed,
             "How long that may take before the eviction or the kill continues without it."),
      text("cluster.name", "", &C::cluster_name, "",
           "Name of the cluster that this node belongs to; others are refused. Empty: no cluster, and no TCP "
           "port is opened."),
      text("cluster.node", "", &C::cluster_node, "",
           "Name of this node, which must be in its certificate; empty: the host's name."),
      text("cluster.listen", "0.0.0.0:7410", &C::cluster_listen, "",
           "Numeric address and TCP port at which other nodes reach this one."),
      text("cluster.advertise", "", &C::cluster_advertise, "",
           "HOST:PORT under which others know this node; empty: the node's name and the port of "
           "cluster.listen."),
      text("cluster.coordinator", "", &C::cluster_coordinator, "",
           "HOST:PORT of the coordinator. The node whose cluster.advertise it is coordinates; the others "
           "attach "
           "to it, and its certificate must name HOST."),
      {"cluster.nodes",
       "",
       OptionKind::kNames,
       &C::cluster_nodes,
       0,
       0,
       {},
       "",
       kFixed,
       "Names of nodes that may take part, a list in which '*' stands for any characters; empty: all that "
       "have "
       "a certificate of cluster.tls_ca."},
      {"cluster.users",
       "",
       OptionKind::kNames,
       &C::cluster_users,
       0,
       0,
       {},
       "",
       kFixed,
       "For the coordinator: whose ranks of groups that span nodes may be on which nodes, a list of "
       "NODES=UID or NODES=FIRST-LAST, as node-*=1000-59999, with '*' for any characters; empty: anybody's "
       "on each node."},
      text("cluster.tls_ca", "", &C::cluster_tls_ca, "",
           "PEM file of the authority whose certificates are accepted. This and the next two are needed "
           "unless "
           "cluster.insecure is true. New connections use the files as they are then."),
      text("cluster.tls_cert", "", &C::cluster_tls_cert, "", "PEM file of this node's certificate."),
      text("cluster.tls_key", "", &C::cluster_tls_key, "", "PEM file of its private key."),
      {"cluster.insecure",
       "false",
       OptionKind::kSwitch,
       &C::cluster_insecure,
       0,
       1,
       {"false", "true"},
       "",
       kFixed,
       "Plain text in place of TLS, for tests: between daemons of one machine only, on loopback addresses."},
      number("cluster.heartbeat_ms", "100", &C::cluster_heartbeat_ms, 10, 60'000, kFixed,
             "How often nodes tell each other that they are alive."),
      number("cluster.node_timeout_ms", "2000", &C::cluster_node_timeout_ms, 100, 600'000, kFixed,
             "A node that says nothing for so long is lost; at least three times cluster.heartbeat_ms."),
      number("cluster.orphan_ms", "10000", &C::cluster_orphan_ms, 100, 3'600'000, kFixed,
             "A node that has been cut off from its coordinator for so long ends those of its ranks whose "
             "group needs a decision."),
      text("network.library", "libucp.so.0", &C::network_library, "",
           "UCX, by which engines of several nodes reach each other; a name or a path."),
      text("network.devices", "auto", &C::network_devices, "",
           "Network interfaces that engines use, as UCX_NET_DEVICES. auto: the one by which the coordinator "
           "is reached, on its own node that of cluster.listen or cluster.advertise; none while that is "
           "unknown. Anybody who reaches their ports owns the engines: the network must be the nodes' own."),
      text("network.transports", "tcp", &C::network_transports, "", "Transports of UCX, as UCX_TLS."),
      {"network.batch_bytes",
       "256KiB",
       OptionKind::kBytes,
       &C::network_batch_bytes,
       4 << 10,
       16 << 20,
       {},
       "",
       kFixed,
       "Rows that cross the network together, at most; the same on all nodes."},
      {"network.window_bytes",
       "1MiB",
       OptionKind::kBytes,
       &C::network_window_bytes,
       4 << 10,
       1 << 30,
       {},
       "",
       kFixed,
       "Rows of one rank that may be under way to one far rank, and as much again for sums; the same on all "
       "nodes."},
      {"network.max_bytes",
       "0",
       OptionKind::kBytes,
       &C::network_max_bytes,
       0,
       kMaxBytes,
       {},
       "",
       kFixed,
       "Bytes that an engine may have in windows and send buffers; 0: a sixteenth of the memory of the "
       "machine, or of the daemon's cgroup."},
      number("network.peer_timeout_ms", "2000", &C::network_peer_timeout_ms, 100, 600'000, kFixed,
             "An engine of another node can't be reached if its answer is pending and it says nothing for so "
             "long."),
      {"network.check",
       "crc",
       OptionKind::kChoice,
       &C::network_check,
       0,
       0,
       {"headers", "crc", "mac"},
       "",
       kFixed,
       "How a receiver sees that rows have come as they were sent; the same on all nodes. crc: by a CRC-32C "
       "of each message, or by the network card where network.transports has RDMA only. mac: by an "
       "AES-128-GMAC, which nobody outside can forge. headers: it does not; headers and announcements have a "
       "CRC-32C in any case."},
  };
}

Status refused(const Option& option, const std::string& value, const std::string& where) {
  return invalid_argument(option.key + (where.empty() ? "" : " in " + where) + " is \"" + value +
                          "\"; allowed: " + allowed_values(option));
}

std::string allowed_levels() {
  std::string rooms;
  for (const std::string_view room : kLogRooms) rooms.append(rooms.empty() ? "" : ", ").append(room);
  return "trace, debug, info, warning, error; after it levels of rooms, as info,session=debug (rooms: " +
         rooms + ")";
}

// Splits "a,b" in two. The names are checked where their meaning is known.
std::vector<std::string> split_names(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

// Digits in `base`, then, for bytes, at most one of KiB MiB GiB TiB.
template <typename Number>
bool parse_number(const std::string& value, int base, bool units, Number& result) {
  const char* end = value.data() + value.size();
  const auto [rest, error] = std::from_chars(value.data(), end, result, base);
  if (error != std::errc{} || rest == value.data()) return false;
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  if (unit.empty()) return true;
  if (!units) return false;
  int shift = 0;
  if (unit == "KiB") shift = 10;
  if (unit == "MiB") shift = 20;
  if (unit == "GiB") shift = 30;
  if (unit == "TiB") shift = 40;
  if (shift == 0 || result > (std::numeric_limits<Number>::max() >> shift)) return false;
  result <<= shift;
  return true;
}

}  // namespace

bool parse_bytes(const std::string& text, std::uint64_t& bytes) {
  return parse_number(text, 10, true, bytes);
}

const std::vector<Option>& option_table() {
  static const std::vector<Option> table = make_table();
  return table;
}

const Option* find_option(const std::string& key) {
  for (const Option& option : option_table()) {
    if (key == option.key) return &option;
  }
  return nullptr;
}

std::string allowed_values(const Option& option) {
  switch (option.kind) {
    case OptionKind::kText: return "text";
    case OptionKind::kNumber:
    case OptionKind::kSigned: return std::to_string(option.low) + ".." + std::to_string(option.high);
    case OptionKind::kAutoNumber:
      return "\"auto\", " + std::to_string(option.low) + ".." + std::to_string(option.high);
    case OptionKind::kGpus: return kAllowedGpus;
    case OptionKind::kBytes: return "bytes up to 1024 TiB, as 123, \"64MiB\", \"10GiB\"";
    case OptionKind::kOctal: return "octal 0..0777";
    case OptionKind::kNames: return "a list of names: [\"node-*\"], or a,b";
    case OptionKind::kLevels: return allowed_levels();
    case OptionKind::kSwitch:
    case OptionKind::kChoice: break;
  }
  std::string list;
  for (const char* choice : option.choices) list += (list.empty() ? "" : ", ") + std::string(choice);
  return list;
}

Status store_option(const Option& option, const std::string& text, Config& config, const std::string& where) {
  if (option.kind == OptionKind::kText) {
    config.*std::get<std::string Config::*>(option.field) = text;
    return {};
  }
  if (option.kind == OptionKind::kLevels) {
    if (!parse_log_levels(text)) return refused(option, text, where);
    config.*std::get<std::string Config::*>(option.field) = text;
    return {};
  }
  if (option.kind == OptionKind::kGpus) {
    return parse_gpu_list(text, config.*std::get<GpuList Config::*>(option.field))
               ? Status()
               : refused(option, text, where);
  }
  if (option.kind == OptionKind::kNames) {
    config.*std::get<std::vector<std::string> Config::*>(option.field) = split_names(text);
    return {};
  }
  std::int64_t value = 0;
  if (option.kind == OptionKind::kAutoNumber && text == "auto") {
    value = kAutomatic;
  } else if (option.kind == OptionKind::kChoice || option.kind == OptionKind::kSwitch) {
    const auto found = std::find(option.choices.begin(), option.choices.end(), text);
    if (found == option.choices.end()) return refused(option, text, where);
    value = found - option.choices.begin();
  } else {
    const int base = option.kind == OptionKind::kOctal ? 8 : 10;
    if (!parse_number(text, base, option.kind == OptionKind::kBytes, value) || value < option.low ||
        value > option.high) {
      return refused(option, text, where);
    }
  }
  if (const auto* narrow = std::get_if<std::uint32_t Config::*>(&option.field)) {
    config.** narrow = static_cast<std::uint32_t>(value);
  } else if (const auto* with_sign = std::get_if<std::int32_t Config::*>(&option.field)) {
    config.** with_sign = static_cast<std::int32_t>(value);
  } else {
    config.*std::get<std::uint64_t Config::*>(option.field) = static_cast<std::uint64_t>(value);
  }
  return {};
}

}  // namespace epd::supervisor
