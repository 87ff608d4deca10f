// Names of options and of variables, also mistyped ones.
#include "config_table.h"

#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>

namespace epd::supervisor {
namespace {

constexpr const char* kConfigVariable = "EPD_CONFIG";
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

// Variables of clients and tests. One that ends in '_' stands for all that begin so.
constexpr std::string_view kOfOthers[] = {"EPD_DEEPEP_", "EPD_FAKE_", "EPD_GPU_",  "EPD_LIBRARY",
                                          "EPD_LOG",     "EPD_SOAK_", "EPD_TEST_", "EPD_WAIT_BY"};

bool is_of_others(std::string_view name) {
  // Kubernetes sets EPD_SERVICE_HOST and EPD_PORT_7410_TCP for a service "epd".
  if (name.find("_SERVICE_") != name.npos || name.find("_PORT") != name.npos) return true;
  return std::any_of(std::begin(kOfOthers), std::end(kOfOthers), [name](std::string_view other) {
    return other.ends_with('_') ? name.starts_with(other) : name == other;
  });
}

// Variables that nobody reads, each with what its user may have meant.
std::vector<std::pair<std::string, std::string>> ignored_variables() {
  std::map<std::string, std::string> instead{{kConfigVariable, kConfigVariable}};
  std::set<std::string_view> read{kConfigVariable};
  for (const Option& option : option_table()) {
    const std::string_view variable = option.environment;
    instead[variable_like(option.key)] =
        !variable.empty() ? variable : "the configuration file, or --" + std::string(option.key);
    if (variable.empty()) continue;
    instead[option.environment] = variable;
    read.insert(variable);
  }
  std::set<std::string_view> known;
  for (const auto& [name, meant] : instead) known.insert(name);
  std::vector<std::pair<std::string, std::string>> ignored;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string name(text.substr(0, text.find('=')));
    if (!name.starts_with("EPD_") || name.size() > kMaxNamedKey || variable(name.c_str()).empty()) continue;
    if (read.contains(name) || is_of_others(name)) continue;
    const std::string_view like = similar(name, known);
    ignored.emplace_back(name, like.empty() ? joined(read) : instead[std::string(like)]);
  }
  return ignored;
}

// `stream` is "DEVICE:INODE", see systemd.exec(5).
bool is_standard_error(const std::string& stream) {
  struct stat info {};
  if (stream.empty() || ::fstat(STDERR_FILENO, &info) != 0) return false;
  return stream == std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino);
}

std::uint64_t number_or_zero(const std::string& text) {
  return std::strtoull(text.c_str(), nullptr, 10);
}

// Options of earlier versions, and what to do.
constexpr std::pair<std::string_view, std::string_view> kRemoved[] = {
    {"devices.mode", "it was removed, since GPUs have one kind of lane; delete it"},
    {"health.listen", "it was removed; metrics.listen serves /healthz and /readyz"},
};

}  // namespace

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
  for (const auto& [removed, advice] : kRemoved) {
    if (key == removed) return invalid_argument(unknown + std::string(advice));
  }
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
    if (std::string value = variable(option.environment); !value.empty())
      environment.options[option.environment] = std::move(value);
  }
  environment.ignored = ignored_variables();
  environment.config_path = variable(kConfigVariable);
  environment.journal = is_standard_error(variable("JOURNAL_STREAM"));
  environment.notify_socket = variable("NOTIFY_SOCKET");
  const std::string meant_for = variable("WATCHDOG_PID");
  if (meant_for.empty() || number_or_zero(meant_for) == static_cast<std::uint64_t>(::getpid()))
    environment.watchdog_us = number_or_zero(variable("WATCHDOG_USEC"));
  return environment;
}

}  // namespace epd::supervisor
