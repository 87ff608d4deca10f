#include "supervisor/config.h"

#include "base/account.h"
#include "base/peer.h"
#include "cluster/address.h"
#include "config_file.h"
#include "memory_limit.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::size_t kMaxNamedKey = 100;  // a longer key resembles none, and is cut in messages

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

// The word that a mistyped one may be meant to be; "": none is like it.
std::string_view similar(std::string_view text, const std::set<std::string_view>& words) {
  const auto nearest =
      std::min_element(words.begin(), words.end(), [&](std::string_view a, std::string_view b) {
        return edit_distance(text, a) < edit_distance(text, b);
      });
  return edit_distance(text, *nearest) <= std::max<std::size_t>(2, text.size() / 4) ? *nearest : "";
}

std::string_view section_of(std::string_view key) {
  return key.substr(0, key.find('.'));
}

std::string joined(const std::set<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) text.append(text.empty() ? "" : ", ").append(word);
  return text;
}

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

AccessDefaults defaults_of(const Config& config) {
  return {config.access_default == 0, static_cast<Right>(config.access_operate), config.max_priority};
}

constexpr std::uint32_t kCudaSms = 24;  // enough for large operations to come close to the wire's speed

// `set` is the limit for one user that the configuration sets; 0: it sets none. The result is at least 1.
Quota general_quota(const Caller& caller, std::uint64_t set, std::uint64_t whole, const std::string& key) {
  const std::string own_key = key + "_per_user";
  if (set != 0) return {set, own_key};
  if (is_privileged(caller.uid)) return {whole, own_key};
  return {share_of_one(whole), own_key + ": 3/4 of " + key + " unless the operator sets it"};
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// "devices.host" as "EPD_DEVICES_HOST"
std::string variable_like(const std::string& key) {
  std::string name = "EPD_";
  for (const char c : key)
    name += c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// Text that has no control characters.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string quoted_list(const std::string& text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    out.append(out.empty() ? "" : ", ").append(quoted(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return "[" + out + "]";
}

// As the file has to write it.
std::string toml_value(const Option& option, const std::string& text) {
  switch (option.kind) {
    case OptionKind::kNumber:
    case OptionKind::kSigned:
    case OptionKind::kSwitch: return text;
    case OptionKind::kAutoNumber: return text == "auto" ? quoted(text) : text;
    case OptionKind::kGpus: return text == "auto" || text == "none" ? quoted(text) : quoted_list(text);
    case OptionKind::kNames: return quoted_list(text);
    case OptionKind::kText:
    case OptionKind::kBytes:
    case OptionKind::kOctal:
    case OptionKind::kChoice:
    case OptionKind::kLevels: break;
  }
  return quoted(text);
}

// Of "DEVICE:INODE", see systemd.exec(5).
bool is_standard_error(const std::string& stream) {
  struct stat info {};
  if (stream.empty() || ::fstat(STDERR_FILENO, &info) != 0) return false;
  return stream == std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino);
}

std::uint64_t number_or_zero(const std::string& text) {
  return std::strtoull(text.c_str(), nullptr, 10);
}

}  // namespace

std::uint32_t Config::effective_sms(abi::DeviceKind kind) const {
  if (device_sms != 0) return device_sms;
  if (kind == abi::DeviceKind::kCuda) return kCudaSms;
  const std::uint32_t devices = host_devices == kAutomatic ? 1 : std::max(1u, host_devices);
  return std::max(1u, std::thread::hardware_concurrency() / devices);
}

std::uint64_t Config::effective_arena_bytes() const {
  if (max_arena_bytes != 0) return max_arena_bytes;
  return available_memory_bytes() * 16;
}

std::uint64_t Config::effective_network_bytes() const {
  return network_max_bytes != 0 ? network_max_bytes : available_memory_bytes() / 16;
}

std::uint64_t Config::effective_routing_bytes() const {
  return max_routing_bytes != 0 ? max_routing_bytes : available_memory_bytes() / 4;
}

Quota Config::max_sessions_of(const Caller& caller) const {
  return access.max_sessions(
      caller, general_quota(caller, max_sessions_per_user, max_sessions, "limits.max_sessions"));
}

Quota Config::max_groups_of(const Caller& caller) const {
  return access.max_groups(caller,
                           general_quota(caller, max_groups_per_user, max_groups, "limits.max_groups"));
}

Quota Config::most_groups_of(std::uint32_t uid) const {
  return access.most_groups(uid,
                            general_quota({uid, {}}, max_groups_per_user, max_groups, "limits.max_groups"));
}

Quota Config::max_arena_bytes_of(const Caller& caller) const {
  return access.max_arena_bytes(caller, general_quota(caller, max_arena_bytes_per_user,
                                                      effective_arena_bytes(), "limits.max_arena_bytes"));
}

Quota Config::max_routing_bytes_of(const Caller& caller) const {
  return access.max_routing_bytes(caller,
                                  general_quota(caller, max_routing_bytes_per_user, effective_routing_bytes(),
                                                "limits.max_routing_bytes"));
}

std::vector<OptionInfo> config_options() {
  std::vector<OptionInfo> list;
  for (const Option& option : option_table()) {
    list.push_back({option.key, option.default_text, allowed_values(option), option.environment,
                    option.reloadable, option.help});
  }
  return list;
}

Status unknown_option(const std::string& key, const std::string& where) {
  if (key.size() > kMaxNamedKey) {
    return invalid_argument("unknown option \"" + key.substr(0, kMaxNamedKey) + "...\" of " +
                            std::to_string(key.size()) + " characters in " + where);
  }
  std::set<std::string_view> keys;
  std::set<std::string_view> sections;
  for (const Option& option : option_table()) {
    keys.insert(option.key);
    sections.insert(section_of(option.key));
  }
  const std::string unknown = "unknown option \"" + key + "\" in " + where + "; ";
  if (const std::string_view like = similar(key, keys); !like.empty())
    return invalid_argument(unknown + "did you mean \"" + std::string(like) + "\"?");
  const std::string section(section_of(key));
  if (!sections.contains(section)) {
    const std::string_view like = similar(section, sections);
    return invalid_argument(unknown + (like.empty() ? "sections: " + joined(sections)
                                                    : "did you mean section [" + std::string(like) + "]?"));
  }
  std::erase_if(keys, [&](std::string_view known) { return section_of(known) != section; });
  return invalid_argument(unknown + "allowed: " + joined(keys));
}

Environment read_environment() {
  Environment environment;
  for (const Option& option : option_table()) {
    if (*option.environment == '\0') {
      if (const std::string name = variable_like(option.key); !variable(name.c_str()).empty())
        environment.ignored.emplace_back(name, option.key);
      continue;
    }
    if (std::string value = variable(option.environment); !value.empty())
      environment.options[option.environment] = std::move(value);
  }
  environment.config_path = variable("EPD_CONFIG");
  environment.journal = is_standard_error(variable("JOURNAL_STREAM"));
  environment.notify_socket = variable("NOTIFY_SOCKET");
  const std::string meant_for = variable("WATCHDOG_PID");
  if (meant_for.empty() || number_or_zero(meant_for) == static_cast<std::uint64_t>(::getpid()))
    environment.watchdog_us = number_or_zero(variable("WATCHDOG_USEC"));
  return environment;
}

Result<Config> load_config(const ConfigSources& sources) {
  Settings settings;
  if (Status status = read_file(sources, settings); !status.ok()) return status;
  for (const Option& option : option_table()) {
    const auto found = sources.environment.find(option.environment);
    if (*option.environment != '\0' && found != sources.environment.end())
      settings.values[option.key] = {found->second, "environment",
                                     std::string("the environment (") + option.environment + ")"};
  }
  for (const auto& [key, value] : sources.flags) {
    const Option* option = find_option(key);
    if (option == nullptr) return unknown_option(key, "the flags");
    settings.values[key] = {text_of_flag(*option, value), "flag", "the flags"};
  }
  Config config;
  std::string wrong;  // all values that are not allowed
  for (const Option& option : option_table()) {
    const auto found = settings.values.find(option.key);
    const Setting setting =
        found == settings.values.end() ? Setting{option.default_text, "default", ""} : found->second;
    if (const Status status = store_option(option, setting.text, config); !status.ok())
      wrong.append(wrong.empty() ? "" : "; ").append(status.message()).append(" in " + setting.where);
    config.entries.push_back({option.key, setting.text, setting.origin, option.reloadable});
  }
  if (!wrong.empty()) return invalid_argument(std::move(wrong));
  if (Status status = check_together(config); !status.ok()) return with_origins(config, status);
  if (Status status = complete_metrics_listen(config.metrics_listen); !status.ok()) return status;
  if (Status status = check_sockets(config); !status.ok()) return with_origins(config, status);
  if (Status status = check_cluster(config); !status.ok()) return status;
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

std::string to_toml(const Config& config) {
  std::string file;
  for (const ConfigEntry& entry : config.entries) {
    const Option* option = find_option(entry.key);
    std::string line = option == nullptr ? "# " + entry.key + ": " + entry.value
                                         : entry.key + " = " + toml_value(*option, entry.value);
    constexpr std::size_t kComment = 64;
    line.append(line.size() < kComment ? kComment - line.size() : 1, ' ');
    file += line + "# " + entry.origin + "\n";
  }
  return file;
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
