// The only place for configuration: file, environment and flags become one immutable, validated Config.
// Nothing else in the daemon reads the environment.
#pragma once

#include "base/log.h"
#include "cluster/settings.h"
#include "common/status.h"
#include "proto/wire.h"
#include "supervisor/access_policy.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace epd::supervisor {

inline constexpr const char* kDefaultConfigPath = "/etc/epd/epd.toml";

// devices.cuda
struct GpuList {
  bool automatic = false;         // every GPU of the machine
  std::vector<std::string> list;  // else these: "0", "GPU-..."
};

inline constexpr std::uint32_t kAutomatic = 0xffff'ffff;  // the number that means "auto"

struct ConfigEntry {
  std::string key;  // "limits.max_sessions"
  std::string value;
  std::string origin;  // "default", "file", "flag", "environment", "operator"
  bool reloadable = false;
};

// Defaults are in the option table (config_table.cpp), not here.
struct Config {
  std::string socket;
  std::string control_socket;
  std::uint32_t socket_mode = 0;
  std::string socket_group;
  std::uint32_t control_socket_mode = 0;
  std::string control_socket_group;
  // The groups' numbers; none: the daemon's own group.
  std::optional<std::uint32_t> socket_gid;
  std::optional<std::uint32_t> control_socket_gid;
  std::string log_level;           // see log_levels
  std::uint32_t log_format = 0;    // LogFormat
  std::uint32_t host_devices = 0;  // kAutomatic: one if no GPU is served
  GpuList cuda_devices;
  std::uint32_t device_sms = 0;  // 0: see effective_sms
  std::uint32_t linger_us = 0;
  std::uint32_t max_sessions = 0;
  std::uint32_t max_sessions_per_user =
      0;  // 0: see max_sessions_of; likewise for the other limits of one user
  std::uint32_t max_groups = 0;
  std::uint32_t max_groups_per_user = 0;
  std::int32_t max_priority = 0;      // see access, also for the next two
  std::uint32_t access_default = 0;   // 0 allow, 1 deny
  std::uint32_t access_operate = 0;   // Right
  std::uint64_t max_arena_bytes = 0;  // 0: see effective_arena_bytes
  std::uint64_t max_arena_bytes_per_user = 0;
  std::uint64_t max_routing_bytes = 0;  // 0: see effective_routing_bytes
  std::uint64_t max_routing_bytes_per_user = 0;
  std::uint32_t attach_ms = 0;
  std::uint32_t join_ms = 0;
  std::uint32_t operation_ms = 0;
  std::uint32_t drain_ms = 0;
  std::uint32_t engine_ack_ms = 0;
  std::uint32_t engine_watchdog_ms = 0;
  std::uint32_t spin_us = 0;
  std::uint32_t restart_backoff_min_ms = 0;
  std::uint32_t restart_backoff_max_ms = 0;
  std::uint32_t max_restarts_per_minute = 0;
  std::string metrics_listen;  // "127.0.0.1:9455"; empty: no metrics
  std::uint32_t metrics_max_groups = 0;
  std::uint32_t metrics_max_ranks = 0;
  std::string mps_control;  // empty: MPS is never asked
  std::uint32_t mps_timeout_ms = 0;
  std::string cluster_name;  // empty: no cluster, and the following options have no effect
  std::string cluster_node;
  std::string cluster_listen;
  std::string cluster_advertise;
  std::string cluster_coordinator;
  std::vector<std::string> cluster_nodes;
  std::vector<std::string> cluster_users;
  std::string cluster_tls_ca;
  std::string cluster_tls_cert;
  std::string cluster_tls_key;
  std::uint32_t cluster_insecure = 0;
  std::uint32_t cluster_heartbeat_ms = 0;
  std::uint32_t cluster_node_timeout_ms = 0;
  std::uint32_t cluster_orphan_ms = 0;
  std::string network_library;
  std::string network_devices;  // "auto": see network.h
  std::string network_transports;
  std::uint64_t network_batch_bytes = 0;
  std::uint64_t network_window_bytes = 0;
  std::uint64_t network_max_bytes = 0;  // 0: see effective_network_bytes
  std::uint32_t network_peer_timeout_ms = 0;
  std::uint32_t network_check = 0;  // index of its words

  std::optional<cluster::Settings> cluster;  // from the options cluster_*, completed
  AccessPolicy access;

  // Every option in the table's order, then "access.rule N" for each rule.
  std::vector<ConfigEntry> entries;

  LogLevels log_levels() const { return parse_log_levels(log_level).value_or(LogLevels()); }
  LogFormat format() const { return static_cast<LogFormat>(log_format); }
  std::uint32_t effective_sms(abi::DeviceKind kind) const;
  std::uint64_t effective_arena_bytes() const;
  std::uint64_t effective_routing_bytes() const;
  std::uint64_t effective_network_bytes() const;
  // The limits of one user: what a rule of the policy says, else limits.*_per_user, else three quarters of
  // the whole. Root and the daemon's own user may have the whole, if neither of the two says otherwise.
  Quota max_sessions_of(const Caller& caller) const;
  Quota max_groups_of(const Caller& caller) const;
  // The most that the limits may allow a user whose unix groups only another node knows.
  Quota most_groups_of(std::uint32_t uid) const;
  Quota max_arena_bytes_of(const Caller& caller) const;
  Quota max_routing_bytes_of(const Caller& caller) const;
};

// One row of the option table. Names and texts are static.
struct OptionInfo {
  std::string key;
  std::string default_text;
  std::string allowed;      // "1..1024", "logfmt, json"
  std::string environment;  // variable, or empty
  bool reloadable = false;
  std::string help;
};
std::vector<OptionInfo> config_options();
// INVALID_ARGUMENT that names `key`, `where` it stands, and the option that it resembles most.
Status unknown_option(const std::string& key, const std::string& where);

struct ConfigSources {
  std::string path;                                // configuration file
  bool path_given = false;                         // false: the file need not exist
  std::map<std::string, std::string> environment;  // variable -> value, only variables of the table
  std::map<std::string, std::string> flags;        // key -> value
};

// The daemon's environment: the options, EPD_CONFIG and systemd's variables.
struct Environment {
  std::map<std::string, std::string> options;
  std::string config_path;        // EPD_CONFIG
  std::string notify_socket;      // NOTIFY_SOCKET
  std::uint64_t watchdog_us = 0;  // WATCHDOG_USEC, if it is meant for this process
  bool journal = false;           // JOURNAL_STREAM is standard error
  // Variables that begin with EPD_ and that nobody reads, as "EPD_SOCKETS", each with what is allowed in its
  // place.
  std::vector<std::pair<std::string, std::string>> ignored;
};
Environment read_environment();

// Later sources win: defaults, file, environment, flags. Unknown keys and bad values are refused by name, all
// at once; what does not fit together only then.
Result<Config> load_config(const ConfigSources& sources);
// The same at run time. INVALID_ARGUMENT names the key if an option has changed that is fixed at start.
Result<Config> reload_config(const Config& current, const ConfigSources& sources);

// A refusal that names a path which the environment has chosen says so too: a shell may have kept the
// variable.
Status with_origins(const Config& config, const Status& refusal);

// Settings that are allowed and probably a mistake: ignored variables, lingering without a GPU, a private key
// that everybody may read.
std::vector<std::string> warnings_of(const Config& config, const Environment& environment);

// Whether an operator may set the option while the daemon runs: log.level and limits.*.
bool is_settable(const std::string& key);
// `config` with other values of such options, by key; their origin is "operator". INVALID_ARGUMENT naming the
// key, the value and what is allowed.
Result<Config> with_options(const Config& config, const std::map<std::string, std::string>& values);

// All options and rules as a configuration file, each with its origin as a comment.
std::string to_toml(const Config& config);

struct ConfigChange {
  std::string key;
  std::string before;  // empty: a rule that is new
  std::string after;   // empty: a rule that is gone
};
// Where values differ, in the order of entries.
std::vector<ConfigChange> changes_between(const Config& before, const Config& after);

}  // namespace epd::supervisor
