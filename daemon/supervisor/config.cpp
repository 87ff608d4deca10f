#include "supervisor/config.h"

#include "access_config.h"
#include "base/account.h"
#include "common/fd.h"
#include "config_table.h"
#include "toml.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace epd::supervisor {
namespace {

struct Setting {
  std::string text;
  const char* origin;
};
// What the file, and then the environment and the flags, say.
struct Settings {
  std::map<std::string, Setting> values;
  AccessRules access;
};
constexpr const char* kRules = "access.rule";
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxKeyParts = 32;
constexpr std::size_t kMaxNamedKey = 100;  // a longer one resembles nothing, and is cut in messages

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

const Option* find_option(const std::string& key) {
  for (const Option& option : option_table()) {
    if (key == option.key) return &option;
  }
  return nullptr;
}

// [0, "GPU-..."] as "0,GPU-...". What can't stand in such a list becomes an entry that is refused.
std::string text_of_list(const toml::array& list) {
  std::string text;
  for (const toml::node& node : list) {
    if (!text.empty()) text += ',';
    if (const auto* entry = node.as_string(); entry != nullptr) {
      text += has_control_characters(entry->get()) ? "?" : entry->get();
    } else if (const auto* number = node.as_integer(); number != nullptr) {
      text += std::to_string(number->get());
    } else {
      text += '?';
    }
  }
  return text.empty() ? "none" : text;
}

Status read_table(const toml::table& table, const std::string& prefix, const std::string& where,
                  Settings& settings) {
  for (const auto& [name, node] : table) {
    const std::string key = prefix + std::string(name.str());
    if (key == kRules) {
      Result<AccessRules> rules = read_access_rules(node, where);
      if (!rules.ok()) return rules.status();
      settings.access = std::move(*rules);
      continue;
    }
    if (const toml::table* inner = node.as_table()) {
      if (Status status = read_table(*inner, key + ".", where, settings); !status.ok()) return status;
      continue;
    }
    const std::string here = where + line_of(node);
    const Option* option = find_option(key);
    if (option == nullptr) return unknown_option(key, here);
    const bool number = option->kind == OptionKind::kNumber || option->kind == OptionKind::kSigned;
    const bool may_be_number =
        number || option->kind == OptionKind::kBytes || option->kind == OptionKind::kAutoNumber;
    if (const auto* list = node.as_array(); list != nullptr && option->kind == OptionKind::kGpus) {
      settings.values[key] = {text_of_list(*list), "file"};
    } else if (list != nullptr && option->kind == OptionKind::kNames) {
      settings.values[key] = {list->empty() ? "" : text_of_list(*list), "file"};
    } else if (const auto* on = node.as_boolean(); on != nullptr && option->kind == OptionKind::kSwitch) {
      settings.values[key] = {on->get() ? "true" : "false", "file"};
    } else if (const auto* text = node.as_string(); text != nullptr && !number) {
      if (has_control_characters(text->get()))
        return invalid_argument(
            std::string(key).append(" in ").append(here).append(" holds control characters; allowed: none"));
      settings.values[key] = {text->get(), "file"};
    } else if (const auto* integer = node.as_integer(); integer != nullptr && may_be_number) {
      settings.values[key] = {std::to_string(integer->get()), "file"};
    } else {
      std::string why = key;
      why.append(" in ").append(here).append(" has the wrong type; allowed: ");
      const bool lists = option->kind == OptionKind::kGpus || option->kind == OptionKind::kNames;
      if (!lists && option->kind != OptionKind::kAutoNumber && option->kind != OptionKind::kSwitch)
        why.append(number ? "an integer, " : "a string, ");
      why.append(allowed_values(*option));
      return invalid_argument(std::move(why));
    }
  }
  return {};
}

Status unreadable(const std::string& path, StatusCode code, const std::string& why) {
  return {code, "configuration file " + path + " can't be read: " + why};
}

Status unreadable(const std::string& path) {
  const int error = errno;
  const bool denied = error == EACCES || error == EPERM;
  return unreadable(path, denied ? StatusCode::kPermissionDenied : StatusCode::kInvalidArgument,
                    std::strerror(error));
}

// A pipe or a terminal could make the daemon's loop wait: what must be waited for is refused.
Result<std::string> read_bytes(const std::string& path, const UniqueFd& file) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return unreadable(path);
  if (!S_ISREG(info.st_mode) && !S_ISCHR(info.st_mode)) {
    return unreadable(path, StatusCode::kInvalidArgument,
                      S_ISDIR(info.st_mode) ? "it is a directory; allowed: a file"
                                            : "it is a pipe or a socket; allowed: a file");
  }
  std::string text;
  for (;;) {
    const std::size_t before = text.size();
    text.resize(before + kReadBytes);
    const ssize_t n = ::read(file.get(), text.data() + before, kReadBytes);
    if (n < 0 && errno != EINTR) return unreadable(path);
    text.resize(before + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    if (n == 0) return text;
    if (text.size() > kMaxFileBytes) {
      return unreadable(path, StatusCode::kInvalidArgument,
                        "it has more than " + std::to_string(kMaxFileBytes) + " bytes");
    }
  }
}

// The file's text in ASCII: in comments, other bytes become '?'; elsewhere they are refused. The parser of
// Debian 12 (toml++ 3.3) runs into undefined behaviour at some characters that are not ASCII. It recurses for
// each part of a key, so keys of many parts are refused before they use up the stack.
Result<std::string> to_ascii(const std::string& path, std::string text) {
  bool comment = false;
  char quote = 0;  // the string that we are in, on this line
  bool escaped = false;
  std::size_t parts = 1;  // of the key or number that we are in
  std::size_t line = 1;
  for (char& c : text) {
    const bool after_escape = std::exchange(escaped, false);
    if (c == '\n') {
      comment = false;
      quote = 0;
      parts = 1;
      ++line;
    } else if (static_cast<unsigned char>(c) >= 0x80) {
      if (!comment) {
        return invalid_argument("configuration file " + path + " (line " + std::to_string(line) +
                                "): a character that is not ASCII; allowed: in comments, and in strings as "
                                "\\u00e9");
      }
      c = '?';
    } else if (quote != 0) {
      escaped = quote == '"' && c == '\\' && !after_escape;
      if (c == quote && !after_escape) quote = 0;
    } else if (!comment) {
      comment = c == '#';
      if (c == '"' || c == '\'') quote = c;
      if (c == '=' || c == ',' || c == '{' || c == '[') parts = 1;
      if (c == '.' && ++parts > kMaxKeyParts) {
        return invalid_argument("configuration file " + path + " (line " + std::to_string(line) +
                                "): a key of more than " + std::to_string(kMaxKeyParts) +
                                " parts; allowed: 2");
      }
    }
  }
  return text;
}

Status read_file(const ConfigSources& sources, Settings& settings) {
  if (sources.path.empty()) return {};
  const UniqueFd file(::open(sources.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!file.valid()) {
    if (errno != ENOENT && errno != ENOTDIR) return unreadable(sources.path);
    if (!sources.path_given) return {};
    return not_found("configuration file " + sources.path + " does not exist");
  }
  Result<std::string> text = read_bytes(sources.path, file);
  if (!text.ok()) return text.status();
  text = to_ascii(sources.path, std::move(*text));
  if (!text.ok()) return text.status();
  const toml::parse_result parsed = toml::parse(*text, sources.path);
  if (!parsed) {
    return invalid_argument("configuration file " + sources.path + line_of(parsed.error().source()) + ": " +
                            std::string(parsed.error().description()));
  }
  return read_table(parsed.table(), "", sources.path, settings);
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

bool is_address_and_port(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) return false;
  std::string host = text.substr(0, colon);
  const bool v6 = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (v6) host = host.substr(1, host.size() - 2);
  in6_addr address{};
  if (::inet_pton(v6 ? AF_INET6 : AF_INET, host.c_str(), &address) != 1) return false;
  std::uint16_t port = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + colon + 1, end, port);
  return error == std::errc() && rest == end && colon + 1 != text.size();
}

Status check_metrics(const Config& config) {
  if (config.metrics_listen.empty() || is_address_and_port(config.metrics_listen)) return {};
  return invalid_argument(
      "metrics.listen is \"" + config.metrics_listen +
      "\"; allowed: empty, or an address and a port 0..65535: 127.0.0.1:9455, [::1]:9455");
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
  if (config.socket == config.control_socket)
    return invalid_argument("daemon.socket and daemon.control_socket are both \"" + config.socket +
                            "\"; allowed: two paths");
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
       config.cluster_node_timeout_ms});
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

constexpr std::uint32_t kCudaSms = 24;  // with which the large operations come close to the wire's speed

std::uint64_t physical_bytes() {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// `set`: the limit for one user that somebody has set; 0: nobody. At least 1.
Quota general_quota(const Caller& caller, std::uint64_t set, std::uint64_t whole, const std::string& key) {
  const std::string own_key = key + "_per_user";
  if (set != 0) return {set, own_key};
  if (caller.uid == 0 || caller.uid == ::geteuid()) return {whole, own_key};
  return {std::max<std::uint64_t>(1, whole - (whole + 3) / 4),
          own_key + ": 3/4 of " + key + " unless the operator sets it"};
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
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
  return physical_bytes() * 16;
}

std::uint64_t Config::effective_network_bytes() const {
  return network_max_bytes != 0 ? network_max_bytes : physical_bytes() / 16;
}

std::uint64_t Config::effective_routing_bytes() const {
  return max_routing_bytes != 0 ? max_routing_bytes : physical_bytes() / 4;
}

Quota Config::max_sessions_of(const Caller& caller) const {
  return access.max_sessions(
      caller, general_quota(caller, max_sessions_per_user, max_sessions, "limits.max_sessions"));
}

Quota Config::max_groups_of(const Caller& caller) const {
  return access.max_groups(caller,
                           general_quota(caller, max_groups_per_user, max_groups, "limits.max_groups"));
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
  const auto& table = option_table();
  const auto nearest = std::min_element(table.begin(), table.end(), [&](const Option& a, const Option& b) {
    return edit_distance(key, a.key) < edit_distance(key, b.key);
  });
  return invalid_argument("unknown option \"" + key + "\" in " + where + "; did you mean \"" + nearest->key +
                          "\"?");
}

Environment read_environment() {
  Environment environment;
  for (const Option& option : option_table()) {
    if (*option.environment == '\0') continue;
    if (std::string value = variable(option.environment); !value.empty())
      environment.options[option.environment] = std::move(value);
  }
  environment.config_path = variable("EPD_CONFIG");
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
      settings.values[option.key] = {found->second, "environment"};
  }
  for (const auto& [key, value] : sources.flags) {
    if (find_option(key) == nullptr) return unknown_option(key, "the flags");
    settings.values[key] = {value, "flag"};
  }
  Config config;
  for (const Option& option : option_table()) {
    const auto found = settings.values.find(option.key);
    const Setting setting =
        found == settings.values.end() ? Setting{option.default_text, "default"} : found->second;
    if (Status status = store_option(option, setting.text, config); !status.ok()) return status;
    config.entries.push_back({option.key, setting.text, setting.origin, option.reloadable});
  }
  if (Status status = check_together(config); !status.ok()) return status;
  if (Status status = check_metrics(config); !status.ok()) return status;
  if (Status status = check_sockets(config); !status.ok()) return status;
  if (Status status = check_cluster(config); !status.ok()) return status;
  for (const AccessRule& rule : settings.access.rules) {
    const std::size_t number = &rule - settings.access.rules.data() + 1;
    config.entries.push_back({std::string(kRules) + " " + std::to_string(number), rule.text, "file", true});
  }
  const AccessDefaults defaults{config.access_default == 0, static_cast<Right>(config.access_operate),
                                config.max_priority};
  config.access = AccessPolicy(defaults, std::move(settings.access.rules), std::move(settings.access.names));
  return config;
}

Result<Config> reload_config(const Config& current, const ConfigSources& sources) {
  Result<Config> loaded = load_config(sources);
  if (!loaded.ok()) return loaded.status();
  for (std::size_t i = 0; i < option_table().size(); ++i) {  // rules, which follow, may always change
    const ConfigEntry& before = current.entries[i];
    const ConfigEntry& after = loaded->entries[i];
    if (before.reloadable || before.value == after.value) continue;
    return invalid_argument(before.key + " changed from \"" + before.value + "\" to \"" + after.value +
                            "\"; it is fixed at start: nothing was applied, restart the daemon");
  }
  return loaded;
}

}  // namespace epd::supervisor
