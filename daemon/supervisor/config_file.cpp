#include "config_file.h"

#include "common/fd.h"
#include "toml.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string_view>
#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // some editors begin UTF-8 with it
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxKeyParts = 32;
constexpr std::size_t kMaxShownValue = 100;  // of one that is no TOML

bool is_list(const Option& option) {
  return option.kind == OptionKind::kGpus || option.kind == OptionKind::kNames;
}

// Turns [0, "GPU-..."] into "0,GPU-...". An element that can't stand in such a list becomes an entry that is
// refused.
std::string text_of_list(const Option& option, const toml::array& list) {
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
  return text.empty() && option.kind == OptionKind::kGpus ? "none" : text;
}

bool is_section(const std::string& key) {
  const auto& table = option_table();
  return std::any_of(table.begin(), table.end(), [&](const Option& option) {
    return std::string_view(option.key).starts_with(key + ".");
  });
}

// "is 5", for the message about a value that stands where it has no place.
std::string is_what(const toml::node& node) {
  if (const auto* text = node.as_string(); text != nullptr && !has_control_characters(text->get()))
    return "is \"" + text->get() + "\"";
  if (const auto* integer = node.as_integer(); integer != nullptr)
    return "is " + std::to_string(integer->get());
  if (const auto* real = node.as_floating_point(); real != nullptr) {
    std::ostringstream text;  // 1e3 is shown as 1000
    text << "is the floating-point number " << real->get();
    return text.str();
  }
  if (const auto* on = node.as_boolean(); on != nullptr) return on->get() ? "is true" : "is false";
  return node.is_array() ? "is a list" : "has the wrong type";
}

std::string allowed_in_file(const Option& option) {
  const bool number = option.kind == OptionKind::kNumber || option.kind == OptionKind::kSigned;
  const bool has_one_type =
      !is_list(option) && option.kind != OptionKind::kAutoNumber && option.kind != OptionKind::kSwitch;
  return (!has_one_type ? "" : number ? "an integer, " : "a string, ") + allowed_values(option);
}

// The text of a value for its option, without its judgement. INVALID_ARGUMENT: it is of another type.
Result<std::string> text_of_value(const Option& option, const toml::node& node, const std::string& here) {
  const bool number = option.kind == OptionKind::kNumber || option.kind == OptionKind::kSigned;
  const bool may_be_number =
      number || option.kind == OptionKind::kBytes || option.kind == OptionKind::kAutoNumber;
  const std::string key_here = std::string(option.key) + " in " + here;
  if (const auto* list = node.as_array(); list != nullptr && is_list(option))
    return text_of_list(option, *list);
  if (const auto* on = node.as_boolean(); on != nullptr && option.kind == OptionKind::kSwitch)
    return std::string(on->get() ? "true" : "false");
  if (const auto* text = node.as_string(); text != nullptr && !number) {
    if (has_control_characters(text->get()))
      return invalid_argument(key_here + " holds control characters; allowed: none");
    return text->get();
  }
  if (const auto* integer = node.as_integer(); integer != nullptr && may_be_number)
    return std::to_string(integer->get());
  return invalid_argument(key_here + " " + is_what(node) + "; allowed: " + allowed_in_file(option));
}

void read_table(const toml::table& table, const std::string& prefix, const std::string& where,
                Settings& settings) {
  for (const auto& [name, node] : table) {
    if (settings.refusals.full()) return;
    const std::string key = prefix + std::string(name.str());
    if (key == kRules) {
      settings.access = read_access_rules(node, where, settings.refusals);
      continue;
    }
    if (const toml::table* inner = node.as_table()) {
      read_table(*inner, key + ".", where, settings);
      continue;
    }
    const std::uint32_t line = line_number(node);
    const std::string here = where + line_of(node);
    const Option* option = find_option(key);
    if (option != nullptr) {
      Result<std::string> text = text_of_value(*option, node, here);
      if (text.ok()) settings.values[key] = {std::move(*text), "file", here, line};
      if (!text.ok()) settings.refusals.add(line, text.status().message());
    } else if (is_section(key)) {
      settings.refusals.add(line,
                            key + " in " + here + " " + is_what(node) + "; allowed: a section [" + key + "]");
    } else {
      settings.refusals.add(line, unknown_option(key, here).message());
    }
  }
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

// A pipe or a terminal could block the daemon's loop. So only what can be read at once is accepted.
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

// The file's text in ASCII. In comments, other bytes become '?'. Elsewhere they are refused. Reason: the
// parser of Debian 12 (toml++ 3.3) has undefined behaviour at some characters that are not ASCII. It also
// recurses for each part of a key, so keys of many parts are refused before they use up the stack.
Result<std::string> to_ascii(const std::string& path, std::string text) {
  bool comment = false;
  char quote = 0;  // the string that the position is in, on this line
  bool escaped = false;
  std::size_t parts = 1;  // of the key or number that the position is in
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

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of(" \t\r"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// "; devices.sms is 5x; allowed: ...", if an option of the line has a value that is no TOML. The parser names
// neither. Empty for any other mistake, and for lines that are not simple.
std::string wrong_value_at(const std::string& text, std::uint32_t line) {
  std::istringstream lines(text);
  std::string current;
  std::string section;
  for (std::uint32_t i = 0; i < line; ++i) {
    if (!std::getline(lines, current)) return "";
    const std::string_view words = trimmed(current);
    if (words.starts_with('[')) section = std::string(trimmed(words.substr(1, words.find(']') - 1))) + ".";
  }
  const std::size_t equals = current.find('=');
  if (equals == std::string::npos) return "";
  const std::string_view assignment(current);
  const Option* option = find_option(section + std::string(trimmed(assignment.substr(0, equals))));
  const std::string value(trimmed(assignment.substr(equals + 1, current.find('#', equals) - equals - 1)));
  if (option == nullptr || value.size() > kMaxShownValue || has_control_characters(value)) return "";
  if (toml::parse("value = " + value)) return "";
  return std::string("; ") + option->key + " is " + (value.empty() ? "nothing" : value) +
         "; allowed: " + allowed_in_file(*option);
}

std::string quoted(const std::string& text) {
  return toml_text(toml::value<std::string>(text));
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

}  // namespace

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
  if (text->starts_with(kByteOrderMark)) text->erase(0, kByteOrderMark.size());
  text = to_ascii(sources.path, std::move(*text));
  if (!text.ok()) return text.status();
  const toml::parse_result parsed = toml::parse(*text, sources.path);
  if (!parsed) {
    const toml::source_region& at = parsed.error().source();
    return invalid_argument("configuration file " + sources.path + line_of(at) + ": " +
                            std::string(parsed.error().description()) + wrong_value_at(*text, at.begin.line));
  }
  read_table(parsed.table(), "", sources.path, settings);
  return {};
}

std::string text_of_flag(const Option& option, const std::string& text) {
  if (!is_list(option) || !text.starts_with('[')) return text;
  const std::string name = "list";
  const Result<std::string> assignment = to_ascii("", name + " = " + text);
  if (!assignment.ok()) return text;
  const toml::parse_result parsed = toml::parse(assignment.value());
  const toml::array* list = parsed && parsed.table().size() == 1 ? parsed.table()[name].as_array() : nullptr;
  return list == nullptr ? text : text_of_list(option, *list);
}

std::string to_toml(const Config& config) {
  std::string file;
  const auto add = [&file](std::string line, const std::string& origin) {
    constexpr std::size_t kComment = 64;
    line.append(line.size() < kComment ? kComment - line.size() : 1, ' ');
    file += line + "# " + origin + "\n";
  };
  for (std::size_t i = 0; i < option_table().size(); ++i) {
    const ConfigEntry& entry = config.entries[i];
    add(entry.key + " = " + toml_value(option_table()[i], entry.value), entry.origin);
  }
  for (const AccessRule& rule : config.access.rules()) {
    add(std::string("[[") + kRules + "]]", "file");
    file += rule.toml;
  }
  return file;
}

}  // namespace epd::supervisor
