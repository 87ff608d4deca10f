#include "access_config.h"

#include "base/peer.h"
#include "config_table.h"

#include <functional>
#include <optional>
#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMaxCount = 65536;

// The value as the file gives it, for messages.
std::string shown(const toml::node& node) {
  if (const auto* text = node.as_string()) return '"' + text->get() + '"';
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  return node.is_array() ? "an array" : node.is_table() ? "a table" : "another type";
}

class RuleReader {
 public:
  RuleReader(std::size_t number, std::string where, std::map<std::uint32_t, std::string>& names)
      : name_("access.rule " + std::to_string(number)), where_(std::move(where)), names_(names) {}

  AccessRule read(const toml::table& table, Refusals& refusals);

 private:
  Status read_key(const std::string& key, const toml::node& node);
  Status each(const std::string& key, const toml::node& node,
              const std::function<Status(const toml::node&)>& take);
  Status id(const std::string& key, const toml::node& node);
  Status pattern(const std::string& key, const toml::node& node, std::vector<std::string>& list);
  Status limit(const std::string& key, const toml::node& node, bool bytes,
               std::optional<std::uint64_t>& limit);
  Status operate(const toml::node& node);
  Status priority(const toml::node& node);
  Status refused(const std::string& key, const toml::node& node, const std::string& allowed) const;

  const std::string name_;
  const std::string where_;
  std::map<std::uint32_t, std::string>& names_;
  AccessRule rule_;
};

Status RuleReader::refused(const std::string& key, const toml::node& node, const std::string& allowed) const {
  return invalid_argument(name_ + " in " + where_ + line_of(node) + ": " + key + " is " + shown(node) +
                          "; allowed: " + allowed);
}

AccessRule RuleReader::read(const toml::table& table, Refusals& refusals) {
  for (const auto& [key, node] : table) {
    const Status status = read_key(std::string(key.str()), node);
    if (!status.ok()) refusals.add(line_number(node), status.message());
  }
  return rule_;
}

Status RuleReader::read_key(const std::string& key, const toml::node& node) {
  Status status;
  std::string value = node.is_array() ? "" : shown(node);
  if (key == "users" || key == "unix_groups") {
    status = each(key, node, [&](const toml::node& item) { return id(key, item); });
  } else if (key == "groups" || key == "devices") {
    auto& list = key == "groups" ? rule_.groups : rule_.devices;
    status = each(key, node, [&](const toml::node& item) { return pattern(key, item, list); });
  } else if (key == "attach") {
    if (!node.is_boolean()) return refused(key, node, "true, false");
    rule_.attach = node.as_boolean()->get();
  } else if (key == "operate") {
    status = operate(node);
  } else if (key == "max_priority") {
    status = priority(node);
  } else if (key == "max_sessions") {
    status = limit(key, node, false, rule_.max_sessions);
  } else if (key == "max_groups") {
    status = limit(key, node, false, rule_.max_groups);
  } else if (key == "max_arena_bytes") {
    status = limit(key, node, true, rule_.max_arena_bytes);
  } else if (key == "max_routing_bytes") {
    status = limit(key, node, true, rule_.max_routing_bytes);
  } else {
    return invalid_argument(name_ + " in " + where_ + line_of(node) + " has an unknown key \"" + key +
                            "\"; allowed: users, unix_groups, attach, operate, groups, devices, "
                            "max_priority, max_sessions, max_groups, max_arena_bytes, max_routing_bytes");
  }
  if (!status.ok()) return status;
  if (const toml::array* items = node.as_array()) {
    for (const toml::node& item : *items) value += (value.empty() ? "" : ",") + shown(item);
  }
  rule_.text += (rule_.text.empty() ? "" : " ") + key + "=" + value;
  rule_.toml += key + " = " + toml_text(node) + "\n";
  return {};
}

Status RuleReader::each(const std::string& key, const toml::node& node,
                        const std::function<Status(const toml::node&)>& take) {
  const toml::array* items = node.as_array();
  // A rule with an empty list of users would apply to everybody.
  if (items == nullptr) return refused(key, node, "an array of at least one");
  if (items->empty())
    return invalid_argument(name_ + " in " + where_ + line_of(node) + ": " + key +
                            " is []; allowed: an array of at least one");
  for (const toml::node& item : *items) {
    if (Status status = take(item); !status.ok()) return status;
  }
  return {};
}

Status RuleReader::id(const std::string& key, const toml::node& node) {
  const bool user = key == "users";
  std::optional<std::uint32_t> id;
  if (const auto* number = node.as_integer()) {
    if (number->get() >= 0 && number->get() <= std::int64_t{kMaxAccountId})
      id = static_cast<std::uint32_t>(number->get());
  } else if (const auto* text = node.as_string(); text != nullptr && !has_control_characters(text->get())) {
    id = user ? find_user_id(text->get()) : find_group_id(text->get());
    if (id && user && text->get() != std::to_string(*id)) names_[*id] = text->get();
  }
  if (!id) {
    return refused(key, node,
                   std::string("the name of a ") + (user ? "user" : "group") +
                       " of this system, or a number 0.." + std::to_string(kMaxAccountId));
  }
  (user ? rule_.users : rule_.unix_groups).push_back(*id);
  return {};
}

// Whether each [ of a pattern has its ]. One that has none stands for itself in fnmatch, and no name has it.
bool closes_brackets(const std::string& pattern) {
  for (std::size_t at = pattern.find('['); at != std::string::npos; at = pattern.find('[', at)) {
    const std::size_t first = at + 1 + (pattern.substr(at + 1).find_first_of("!^") == 0 ? 1 : 0);
    const std::size_t close = pattern.find(']', first + 1);  // one that comes first stands for itself
    if (close == std::string::npos) return false;
    at = close;
  }
  return true;
}

Status RuleReader::pattern(const std::string& key, const toml::node& node, std::vector<std::string>& list) {
  const auto* text = node.as_string();
  if (text == nullptr || text->get().empty() || has_control_characters(text->get()) ||
      !closes_brackets(text->get()))
    return refused(key, node, "names, in which * and ? and [abc] stand for others");
  list.push_back(text->get());
  return {};
}

Status RuleReader::operate(const toml::node& node) {
  const auto* text = node.as_string();
  for (const auto& [word, right] : {std::pair("none", Right::kNone), std::pair("read", Right::kRead),
                                    std::pair("change", Right::kChange)}) {
    if (text != nullptr && text->get() == word) rule_.operate = right;
  }
  return rule_.operate ? Status() : refused("operate", node, "\"none\", \"read\", \"change\"");
}

Status RuleReader::priority(const toml::node& node) {
  const auto* number = node.as_integer();
  if (number == nullptr || number->get() < abi::kMinPriority || number->get() > abi::kMaxPriority) {
    return refused("max_priority", node,
                   std::to_string(abi::kMinPriority) + ".." + std::to_string(abi::kMaxPriority));
  }
  rule_.max_priority = static_cast<std::int32_t>(number->get());
  return {};
}

Status RuleReader::limit(const std::string& key, const toml::node& node, bool bytes,
                         std::optional<std::uint64_t>& limit) {
  std::uint64_t value = 0;
  if (const auto* number = node.as_integer(); number != nullptr && number->get() > 0) {
    value = static_cast<std::uint64_t>(number->get());
  } else if (const auto* text = node.as_string();
             !bytes || text == nullptr || !parse_bytes(text->get(), value)) {
    value = 0;
  }
  const std::uint64_t highest = bytes ? std::uint64_t{kMaxBytes} : kMaxCount;
  if (value == 0 || value > highest) {
    return refused(
        key, node,
        bytes ? "bytes up to 1024 TiB, as 123, \"64MiB\", \"10GiB\"" : "1.." + std::to_string(highest));
  }
  limit = value;
  return {};
}

}  // namespace

AccessRules read_access_rules(const toml::node& node, const std::string& where, Refusals& refusals) {
  AccessRules result;
  const toml::array* items = node.as_array();
  if (items == nullptr) {
    refusals.add(line_number(node), "access.rule in " + where + line_of(node) + " is " + shown(node) +
                                        "; allowed: [[access.rule]], once for each rule");
    return result;
  }
  for (const toml::node& item : *items) {
    const std::size_t number = result.rules.size() + 1;
    const toml::table* table = item.as_table();
    if (table == nullptr) {
      refusals.add(line_number(item), "access.rule " + std::to_string(number) + " in " + where +
                                          line_of(item) + " is " + shown(item) + "; allowed: a table");
      return result;
    }
    result.rules.push_back(RuleReader(number, where, result.names).read(*table, refusals));
  }
  return result;
}

}  // namespace epd::supervisor
