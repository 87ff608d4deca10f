#include "supervisor/config.h"

#include "base/peer.h"
#include "cluster/address.h"
#include "config_file.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

namespace epd::supervisor {
namespace {

Status find_socket_group(const char* key, const std::string& name, std::optional<std::uint32_t>& gid) {
  if (name.empty()) return {};
  gid = find_group_id(name);
  if (gid) return {};
  return invalid_argument(std::string(key) + " is \"" + name +
                          "\"; allowed: the name of a group of this system, or a number 0.." +
                          std::to_string(kMaxAccountId));
}

Status check_path(const char* key, const std::string& path) {
  constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
  if (path.find(':') != std::string::npos)
    return invalid_argument(std::string(key) + " is \"" + path +
                            "\"; allowed: a path without colons, which clients put between paths");
  if (!path.empty() && path.size() <= kLongest) return {};
  return invalid_argument(std::string(key) + " is \"" + path + "\", which has " +
                          std::to_string(path.size()) + " characters; allowed: 1.." +
                          std::to_string(kLongest));
}

Status check_sockets(Config& config) {
  Status status = check_path("daemon.socket", config.socket);
  if (status.ok()) status = check_path("daemon.control_socket", config.control_socket);
  if (status.ok()) status = find_socket_group("daemon.socket_group", config.socket_group, config.socket_gid);
  if (status.ok()) {
    status = find_socket_group("daemon.control_socket_group", config.control_socket_group,
                               config.control_socket_gid);
  }
  return status;
}

// In one form, whatever its spelling. No value if the text is no numeric address with a port.
std::optional<std::string> address_and_port(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  std::string host = text.substr(0, colon);
  const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (has_brackets) host = host.substr(1, host.size() - 2);
  if (has_brackets != (host.find(':') != std::string::npos)) return std::nullopt;
  std::uint16_t port = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + colon + 1, end, port);
  if (error != std::errc() || rest != end || colon + 1 == text.size()) return std::nullopt;
  const std::optional<cluster::SocketAddress> address = cluster::numeric_address({host, port});
  return address ? std::optional(cluster::to_string(*address)) : std::nullopt;
}

// A port alone is one of the loopback address, so that nobody else reaches it by mistake.
Status complete_metrics_listen(std::string& listen) {
  if (listen.empty()) return {};
  std::optional<std::string> complete =
      address_and_port(listen.find(':') == std::string::npos ? "127.0.0.1:" + listen : listen);
  if (!complete) {
    return invalid_argument("metrics.listen is \"" + listen +
                            "\"; allowed: empty, a port 0..65535 of 127.0.0.1, or an address and a port: "
                            "127.0.0.1:9455, [::1]:9455");
  }
  listen = std::move(*complete);
  return {};
}

Status check_together(const Config& config) {
  if (config.restart_backoff_min_ms > config.restart_backoff_max_ms) {
    return invalid_argument("engine.restart_backoff_min_ms is " +
                            std::to_string(config.restart_backoff_min_ms) +
                            "; allowed: at most engine.restart_backoff_max_ms = " +
                            std::to_string(config.restart_backoff_max_ms));
  }
  const GpuList& gpus = config.cuda_devices;
  if (config.host_devices == 0 && !gpus.automatic && gpus.list.empty())
    return invalid_argument("devices.host is 0 and devices.cuda is \"none\"; allowed: at least one device");
  using std::filesystem::path;
  if (path(config.socket).lexically_normal() == path(config.control_socket).lexically_normal())
    return invalid_argument("daemon.socket is \"" + config.socket + "\" and daemon.control_socket is \"" +
                            config.control_socket + "\"; allowed: two paths");
  return {};
}

Status check_cluster(Config& config) {
  if (config.cluster_name.empty()) {
    for (const ConfigEntry& entry : config.entries) {
      const bool of_cluster = entry.key.starts_with("cluster.") || entry.key.starts_with("network.");
      if (!of_cluster || entry.value == find_option(entry.key)->default_text) continue;
      return invalid_argument("cluster.name is empty, but " + entry.key + " is \"" + entry.value +
                              "\"; allowed: the cluster's name, or nothing else of cluster.* and network.*");
    }
    return {};
  }
  Result<cluster::Settings> settings = cluster::complete(
      {config.cluster_name, config.cluster_node, config.cluster_listen, config.cluster_advertise,
       config.cluster_coordinator, config.cluster_nodes, config.cluster_tls_ca, config.cluster_tls_cert,
       config.cluster_tls_key, config.cluster_insecure != 0, config.cluster_heartbeat_ms,
       config.cluster_node_timeout_ms, config.cluster_users});
  if (!settings.ok()) return settings.status();
  config.cluster = std::move(*settings);
  if (config.network_library.empty() || config.network_devices.empty() || config.network_transports.empty()) {
    return invalid_argument(
        "network.library, network.devices or network.transports is \"\"; allowed: as libucp.so.0, auto, tcp");
  }
  if (config.network_window_bytes < config.network_batch_bytes) {
    return invalid_argument(
        "network.window_bytes is " + std::to_string(config.network_window_bytes) +
        "; allowed: at least network.batch_bytes = " + std::to_string(config.network_batch_bytes));
  }
  return {};
}

Status check_listeners(const Config& config) {
  if (!config.cluster) return {};
  const std::optional<cluster::HostPort> metrics = cluster::parse_host_port(config.metrics_listen);
  const std::optional<cluster::HostPort> nodes = cluster::parse_host_port(config.cluster->listen);
  if (!metrics || !nodes || metrics->port == 0 || metrics->port != nodes->port) return {};
  if (metrics->host != nodes->host && !cluster::is_wildcard(metrics->host) &&
      !cluster::is_wildcard(nodes->host))
    return {};
  return invalid_argument("metrics.listen is \"" + config.metrics_listen + "\" and cluster.listen is \"" +
                          config.cluster->listen + "\"; allowed: two ports, or two addresses");
}

AccessDefaults defaults_of(const Config& config) {
  return {config.access_default == 0, static_cast<Right>(config.access_operate), config.max_priority};
}

}  // namespace

std::vector<OptionInfo> config_options() {
  std::vector<OptionInfo> list;
  for (const Option& option : option_table()) {
    list.push_back({option.key, option.default_text, allowed_values(option), option.environment,
                    option.reloadable, option.help});
  }
  return list;
}

Result<Config> load_config(const ConfigSources& sources) {
  Settings settings;
  if (Status status = read_file(sources, settings); !status.ok()) return status;
  Refusals& refusals = settings.refusals;
  for (const Option& option : option_table()) {
    const auto found = sources.environment.find(option.environment);
    if (*option.environment != '\0' && found != sources.environment.end())
      settings.values[option.key] = {found->second, "environment",
                                     std::string("the environment (") + option.environment + ")"};
  }
  for (const auto& [key, value] : sources.flags) {
    const Option* option = find_option(key);
    if (option == nullptr)
      refusals.add(Refusals::kNoLine, unknown_option(key, "the flags").message());
    else
      settings.values[key] = {text_of_flag(*option, value), "flag", "the flags"};
  }
  Config config;
  for (const Option& option : option_table()) {
    const auto found = settings.values.find(option.key);
    const Setting setting =
        found == settings.values.end() ? Setting{option.default_text, "default", ""} : found->second;
    if (const Status status = store_option(option, setting.text, config, setting.where); !status.ok())
      refusals.add(setting.line, status.message());
    config.entries.push_back({option.key, setting.text, setting.origin, option.reloadable});
  }
  if (Status status = refusals.status(); !status.ok()) return status;
  if (Status status = check_together(config); !status.ok()) return with_origins(config, status);
  if (Status status = complete_metrics_listen(config.metrics_listen); !status.ok()) return status;
  if (Status status = check_sockets(config); !status.ok()) return with_origins(config, status);
  if (Status status = check_cluster(config); !status.ok()) return status;
  if (Status status = check_listeners(config); !status.ok()) return status;
  for (const AccessRule& rule : settings.access.rules) {
    const std::size_t number = &rule - settings.access.rules.data() + 1;
    config.entries.push_back({std::string(kRules) + " " + std::to_string(number), rule.text, "file", true});
  }
  config.access =
      AccessPolicy(defaults_of(config), std::move(settings.access.rules), std::move(settings.access.names));
  return config;
}

Result<Config> reload_config(const Config& current, const ConfigSources& sources) {
  Result<Config> loaded = load_config(sources);
  if (!loaded.ok()) return loaded.status();
  for (std::size_t i = 0; i < option_table().size();
       ++i) {  // access rules come after the options, and may always change
    const ConfigEntry& before = current.entries[i];
    const ConfigEntry& after = loaded->entries[i];
    if (before.reloadable || before.value == after.value) continue;
    return invalid_argument(before.key + " changed from \"" + before.value + "\" to \"" + after.value +
                            "\"; it is fixed at start: nothing was applied, restart the daemon");
  }
  return loaded;
}

Status with_origins(const Config& config, const Status& refusal) {
  std::string text = refusal.message();
  for (const ConfigEntry& entry : config.entries) {
    const Option* option = find_option(entry.key);
    if (option == nullptr || option->kind != OptionKind::kText || entry.origin != "environment") continue;
    if (refusal.message().find(entry.value) != std::string::npos)
      text.append("; ")
          .append(entry.key)
          .append(" comes from the environment (")
          .append(option->environment) += ")";
  }
  return {refusal.code(), text};
}

std::vector<std::string> warnings_of(const Config& config, const Environment& environment) {
  std::vector<std::string> warnings;
  for (const auto& [name, instead] : environment.ignored)
    warnings.push_back("the environment variable " + name + " is not read; allowed: " + instead);
  if (config.linger_us != 0 && !config.cuda_devices.automatic && config.cuda_devices.list.empty())
    warnings.push_back("devices.linger_us is " + std::to_string(config.linger_us) +
                       " and devices.cuda is \"none\": no SMs linger, since host devices keep none");
  struct stat info {};
  const std::string& key = config.cluster_tls_key;
  if (config.cluster && !key.empty() && ::stat(key.c_str(), &info) == 0 && (info.st_mode & S_IRWXO) != 0)
    warnings.push_back("cluster.tls_key is \"" + key + "\", a private key that every user may open");
  return warnings;
}

bool is_settable(const std::string& key) {
  return find_option(key) != nullptr && (key == "log.level" || key.starts_with("limits."));
}

Result<Config> with_options(const Config& config, const std::map<std::string, std::string>& values) {
  Config changed = config;
  for (const auto& [key, value] : values) {
    const Option* option = find_option(key);
    if (option == nullptr) return unknown_option(key, "what is to be set");
    if (!is_settable(key))
      return invalid_argument(key + " can't be set while the daemon runs; allowed: log.level, limits.*");
    if (Status status = store_option(*option, value, changed); !status.ok()) return status;
    ConfigEntry& entry = changed.entries[static_cast<std::size_t>(option - option_table().data())];
    entry.value = value;
    entry.origin = "operator";
  }
  changed.access.set_defaults(defaults_of(changed));
  return changed;
}

std::vector<ConfigChange> changes_between(const Config& before, const Config& after) {
  std::vector<ConfigChange> changes;
  static const ConfigEntry kNone;
  for (std::size_t i = 0; i < std::max(before.entries.size(), after.entries.size()); ++i) {
    const ConfigEntry& old = i < before.entries.size() ? before.entries[i] : kNone;
    const ConfigEntry& now = i < after.entries.size() ? after.entries[i] : kNone;
    if (old.value != now.value)
      changes.push_back({old.key.empty() ? now.key : old.key, old.value, now.value});
  }
  return changes;
}

}  // namespace epd::supervisor
