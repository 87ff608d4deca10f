#include "grammar.h"

#include "commands.h"
#include "format.h"
#include "proto/shape_rules.h"

#include <sys/un.h>
#include <algorithm>
#include <array>
#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace epd::ctl {
namespace {

// CLI11 by itself reads 010 as 8, 0x1 as 1 and -1 as the largest number, and takes the nearest that fits.
CLI::Validator whole(std::uint64_t least, std::uint64_t most) {
  return CLI::Validator([=](std::string& text) { return refuse_whole(text, least, most); }, "");
}

// Takes any 32-bit number: check_shape decides which are allowed.
CLI::Validator field_of_shape(const char* name) {
  const std::string allowed = abi::allowed_values(abi::shape_field(name));
  return CLI::Validator([allowed](std::string& text) { return refuse_whole(text, allowed); }, "");
}

CLI::Validator seconds(double least, double most, const std::string& allowed) {
  return CLI::Validator([=](std::string& text) { return refuse_seconds(text, least, most, allowed); }, "");
}

std::string ascii(const std::string& text) {
  std::string out;
  for (const unsigned char c : text) {
    std::array<char, 8> escape{};
    std::snprintf(escape.data(), escape.size(), c >= 0x20 && c < 0x7f ? "%c" : "\\x%02x", c);
    out += escape.data();
  }
  return out;
}

std::string refuse_since(const std::string& text) {
  if (parse_whole(text) || parse_duration(text)) return "";
  return "\"" + ascii(text) + "\" is refused; allowed: the number of an event, or 90s, 5m, 1h, 2d";
}

// Messages can carry only UTF-8.
CLI::Validator utf8() {
  return CLI::Validator(
      [](std::string& text) {
        try {
          (void)Json(text).dump();
          return std::string();
        } catch (const Json::exception&) {
          return "\"" + ascii(text) + "\" is not UTF-8";
        }
      },
      "");
}

std::string check_socket_path(const std::string& path) {
  constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty()) return "is empty; allowed: a path";
  if (path.size() <= kLongest) return "";
  return "has " + std::to_string(path.size()) + " characters; allowed: 1.." + std::to_string(kLongest);
}

constexpr std::uint32_t kMaxTimeoutMs = 600'000;
constexpr std::uint32_t kMaxDrainMs = 86'400'000;
constexpr double kMinIntervalS = 0.05;
constexpr double kMaxIntervalS = 3600;

// "set device"
std::string path_of(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  const bool top = parent == nullptr || parent->get_parent() == nullptr;
  return (top ? "" : path_of(*parent) + " ") + command.get_name();
}

CLI::App* add_group_of_commands(CLI::App& app, const char* name) {
  CLI::App* sub = app.add_subcommand(name);
  const help::Page page = help::page(path_of(*sub));
  sub->description(page.summary);
  sub->footer(page.text);
  sub->fallthrough();  // global options are fine after the command too
  return sub;
}

CLI::App* add_command(CLI::App& app, Arguments& arguments, const char* name) {
  CLI::App* sub = add_group_of_commands(app, name);
  sub->callback([&arguments, path = path_of(*sub)] { arguments.command = path; });
  return sub;
}

// An option that becomes text in a message. `type` tells completion what to offer.
template <typename Value>
CLI::Option* add_text(CLI::App* command, const char* name, Value& value, const char* what, const char* type) {
  return command->add_option(name, value, what)->type_name(type)->check(utf8());
}

template <typename Number>
CLI::Option* add_number(CLI::App* command, const char* name, Number& value, const char* what,
                        std::uint64_t least, std::uint64_t most, const char* type = "N") {
  return command->add_option(name, value, what)->type_name(type)->check(whole(least, most));
}

void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("--socket", arguments.socket, "Control socket of the daemon")
      ->envname("EPD_CONTROL_SOCKET")
      ->type_name("PATH")
      ->check(check_socket_path)
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "JSON instead of text");
  add_number(&app, "--timeout-ms", arguments.timeout_ms, "How long to wait for each answer, 1..600000", 1,
             kMaxTimeoutMs, "MS")
      ->capture_default_str();
}

void add_views(CLI::App& app, Arguments& arguments) {
  add_command(app, arguments, "status");
  add_command(app, arguments, "devices");
  add_command(app, arguments, "nodes");
  add_command(app, arguments, "network");
  add_command(app, arguments, "sessions");
  CLI::App* groups = add_command(app, arguments, "groups");
  groups->add_flag("--members", arguments.members, "List the members of each group too");
  add_command(app, arguments, "ops");
  CLI::App* op = add_command(app, arguments, "op");
  add_text(op, "ID", arguments.operation, "As epctl ops prints it", "OPERATION")
      ->check(refuse_operation)
      ->required();
  CLI::App* stats = add_command(app, arguments, "stats");
  stats->add_flag("--ranks", arguments.ranks, "One line per rank of each group too");
  CLI::App* waits = add_command(app, arguments, "waits");
  add_text(waits, "GROUP", arguments.target, "Name, id or id:ID; default: all, without pairs of ranks",
           "GROUP")
      ->check([](const std::string& name) {
        return name.empty() ? "is empty; allowed: a name, an id or id:ID" : "";
      });
  CLI::App* watch = add_command(app, arguments, "watch");
  watch->add_option("--interval", arguments.interval_s, "Seconds between two looks, 0.05..3600")
      ->type_name("SECONDS")
      ->check(seconds(kMinIntervalS, kMaxIntervalS, "0.05..3600 seconds"))
      ->capture_default_str();
  add_number(watch, "--count", arguments.count, "Number of looks; default: until interrupted", 1, UINT32_MAX);
  CLI::App* events = add_command(app, arguments, "events");
  events->add_flag("--follow", arguments.follow, "Go on with new events");
  events->add_option("--level", arguments.level, "Only events of at least this importance")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
  events->add_option("--since", arguments.since, "Only events after number N, or of the last 90s, 5m, 1h, 2d")
      ->type_name("N|TIME")
      ->check(refuse_since);
  add_number(events, "--last", arguments.last, "Only the last N of those that are remembered", 1, UINT32_MAX);
  add_text(events, "--group", arguments.group, "Only events of this group, by name, id or id:ID", "GROUP");
  add_text(events, "--node", arguments.node, "Only events of this node of the cluster", "NODE");
  add_command(app, arguments, "config");
  CLI::App* health = add_command(app, arguments, "health");
  add_text(health, "SUBSYSTEM", arguments.subsystem, "daemon, control, membership, cluster or device/NAME",
           "SUBSYSTEM");
}

void add_set(CLI::App& app, Arguments& arguments) {
  CLI::App* set = add_group_of_commands(app, "set");
  set->require_subcommand(1);
  CLI::App* device = add_command(*set, arguments, "device");
  add_text(device, "NAME", arguments.target, "As epctl devices prints it", "DEVICE")->required();
  CLI::App* group = add_command(*set, arguments, "group");
  add_text(group, "GROUP", arguments.target, "Name, id or id:ID", "GROUP")->required();
  CLI::App* log = add_command(*set, arguments, "log");
  CLI::App* limits = add_command(*set, arguments, "limits");
  for (const auto& [command, type] : {std::pair(device, "sms=N"),
                                      {group, "sms=N|priority=N|linger_us=N"},
                                      {log, "level=LEVELS"},
                                      {limits, "LIMIT"}})
    add_text(command, "SETTING", arguments.settings, "What to set", type)->required();
}

void add_evict(CLI::App& app, Arguments& arguments) {
  static std::string rank_word;  // of no further use
  CLI::App* evict = add_group_of_commands(app, "evict");
  evict->require_subcommand(1);
  CLI::App* session = add_command(*evict, arguments, "session");
  add_number(session, "ID", arguments.session_id, "As epctl sessions prints it", 0, UINT64_MAX, "SESSION")
      ->required();
  CLI::App* group = add_command(*evict, arguments, "group");
  add_text(group, "GROUP", arguments.target, "Name, id or id:ID", "GROUP")->required();
  group->add_option("rank", rank_word, "The word \"rank\"")->required()->check(CLI::IsMember({"rank"}));
  add_number(group, "RANK", arguments.rank, "Its number", 0, UINT32_MAX)->required();
  for (CLI::App* command : {session, group})
    add_text(command, "--reason", arguments.reason, "What clients are told: one line of up to 160 bytes",
             "TEXT");
}

void add_restart(CLI::App& app, Arguments& arguments) {
  CLI::App* restart = add_group_of_commands(app, "restart");
  restart->require_subcommand(1);
  CLI::App* device = add_command(*restart, arguments, "device");
  add_text(device, "NAME", arguments.target, "As epctl devices prints it", "DEVICE")->required();
}

// run_size checks the ranges, with the daemon's rules.
void add_size(CLI::App& app, Arguments& arguments) {
  abi::GroupShape& shape = arguments.size.shape;
  shape.depth = abi::kDefaultDepth;
  shape.expert_alignment = 1;
  CLI::App* size = add_command(app, arguments, "size");
  const auto number = [size](const char* name, const char* field, std::uint32_t& value, const char* text) {
    return size->add_option(name, value, text)->type_name("N")->check(field_of_shape(field));
  };
  const auto word = [size]<typename Value>(const char* name, Value& value,
                                           const std::vector<std::string>& words, const char* text) {
    const auto take = [&value, words](const std::string& chosen) {
      value = static_cast<Value>(number_of(words, chosen));
    };
    size->add_option_function<std::string>(name, take, text)
        ->check(CLI::IsMember(words))
        ->default_str(words[0]);
  };
  const auto list = [size](const char* name, std::vector<std::string>& value,
                           const std::vector<std::string>& words, const char* text) {
    size->add_option(name, value, text)->delimiter(',')->allow_extra_args(false)->check(CLI::IsMember(words));
  };
  number("--ranks", "num_ranks", shape.num_ranks, "num_ranks of the group")->required();
  number("--experts", "num_experts", shape.num_experts, "num_experts, of all ranks")->required();
  number("--hidden", "hidden", shape.hidden, "Elements of a row")->required();
  number("--tokens", "max_tokens", shape.max_tokens, "max_tokens, of a rank in one operation")->required();
  number("--topk", "topk", shape.topk, "Choices of a token")->required();
  number("--depth", "depth", shape.depth, "Buffer slots")->capture_default_str();
  word("--payload", shape.payload, words_of<v1::Payload>(), "Format of rows");
  word("--layout", shape.layout, words_of<v1::Layout>(), "Layout of received rows");
  word("--index-type", shape.index_type, words_of<v1::IndexType>(), "Type of topk_idx");
  word("--scale-format", shape.scale_format, words_of<v1::ScaleFormat>(), "Format of the scales of FP8 rows");
  word("--scale-layout", shape.scale_layout, words_of<v1::ScaleLayout>(),
       "Layout of the scales of received rows");
  list("--more-formats", arguments.size.more_formats, row_format_words(),
       "Row formats that dispatches may choose in place of the first, separated by commas");
  number("--expert-alignment", "expert_alignment", shape.expert_alignment, "Rows")->capture_default_str();
  number("--opaque-bytes", "opaque_bytes", shape.opaque_bytes, "Bytes of a row, with payload opaque");
  number("--biases", "num_biases", shape.num_biases, "Bias regions of combine");
  number("--handles", "num_handles", shape.num_handles, "Routings that dispatches may keep");
  number("--max-recv-rows", "max_recv_rows", shape.max_recv_rows,
         "Rows of recv_x and y; default: the worst case");
  size->add_option("--device-kind", arguments.size.device_kind, "Kind of the devices")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
}

// Whether CLI11 takes the value of a flag for "yes". A value that it refuses asks for JSON too.
bool is_yes(const std::string& value) {
  try {
    return CLI::detail::to_flag_value(value) > 0;
  } catch (const std::exception&) {
    return true;
  }
}

const CLI::App& deepest_command(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().back();
  return *at;
}

std::string names_of_commands(const CLI::App& app) {
  std::string names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    append(names, sub->get_name());
  return names;
}

// The words that may follow a command: "GROUP, --json".
std::string words_behind(const CLI::App& command) {
  std::string words;
  for (const CLI::App* at = &command; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      if (option == at->get_help_ptr() || option == at->get_version_ptr()) continue;
      append(words, option->get_positional() ? option->get_type_name() : option->get_name());
    }
  }
  return words;
}

// The prefix of a word; "" for the program itself.
std::string before_word(const CLI::App& app, const CLI::App& command) {
  return &command == &app ? "" : command.get_name() + " ";
}

}  // namespace

help::Page help::page(const std::string& command) {
  const std::string text = std::string("\n") + kText;
  const std::string title = "\n== " + command;
  std::size_t at = text.find(title + ": ");
  if (at == std::string::npos) at = text.find(title + "\n");
  const std::size_t line_end = text.find('\n', at + 1);
  const std::size_t summary = std::min(at + title.size() + 2, line_end);
  const std::size_t end = std::min(text.find("\n== ", line_end), text.size() - 1);
  return {text.substr(summary, line_end - summary), text.substr(line_end, end + 1 - line_end)};
}

void build_grammar(CLI::App& app, Arguments& arguments) {
  const std::string about = help::page("epctl").text;
  app.description(about.substr(1, about.size() - 2));
  app.footer(help::page("footer").text);
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  add_options(app, arguments);
  add_views(app, arguments);
  add_set(app, arguments);
  add_command(app, arguments, "reload");
  add_evict(app, arguments);
  add_restart(app, arguments);
  add_size(app, arguments);
  CLI::App* drain = add_command(app, arguments, "drain");
  add_number(drain, "--timeout-ms", arguments.drain_ms,
             "Time for sessions to end by themselves, 1..86400000; default: as configured", 1, kMaxDrainMs,
             "MS");
  drain->add_flag("--wait", arguments.wait, "Return when the daemon has gone");
  CLI::App* doctor = add_command(app, arguments, "doctor");
  doctor->add_flag("--strict", arguments.strict, "Warnings are problems too (exit code 4)");
  add_command(app, arguments, "version");
  CLI::App* completion = add_command(app, arguments, "completion");
  completion->add_option("SHELL", arguments.shell, "The shell whose script is printed")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
}

bool wants_json(int argc, char** argv) {
  constexpr std::string_view kWithValue = "--json=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return false;
    if (word == "--json") return true;
    if (word.starts_with(kWithValue) && is_yes(std::string(word.substr(kWithValue.size())))) return true;
  }
  return false;
}

std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = deepest_command(app);
  const std::string allowed = names_of_commands(command);
  const bool lacks_command = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !allowed.empty();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && allowed.empty()) {
    return path_of(command) + ": \"" + printable(app.remaining(true).front()) +
           "\" is not expected; allowed: " + words_behind(command);
  }
  if (!lacks_command) return (&command == &app ? "" : path_of(command) + ": ") + error.what();
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return command.get_name() + " needs a command; allowed: " + allowed;
  const char* kind = unknown.front().starts_with("-") ? "option" : "command";
  return std::string("unknown ") + kind + " \"" + before_word(app, command) + printable(unknown.front()) +
         "\"; allowed commands: " + allowed;
}

}  // namespace epd::ctl
