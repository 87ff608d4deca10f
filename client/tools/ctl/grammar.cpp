#include "grammar.h"

#include "help.h"
#include "json.h"
#include "numbers.h"
#include "proto/shape_rules.h"
#include "size.h"

#include <sys/un.h>
#include <array>
#include <cstdio>

namespace epd::ctl {
namespace {

// CLI11 by itself reads 010 as 8, 0x1 as 1 and -1 as the largest number, and takes the nearest that fits.
CLI::Validator whole(std::uint64_t least, std::uint64_t most) {
  return CLI::Validator([=](std::string& text) { return refuse_whole(text, least, most); }, "");
}

// Whether the number is allowed, check_shape judges.
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

// Only such text fits into a message.
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

CLI::App* add_group_of_commands(CLI::App& app, const char* name, const help::Page& page) {
  CLI::App* sub = app.add_subcommand(name, page.summary);
  sub->footer(page.text);
  sub->fallthrough();  // global options are fine after the command too
  return sub;
}

CLI::App* add_command(CLI::App& app, Arguments& arguments, const char* name, Command command,
                      const help::Page& page) {
  CLI::App* sub = add_group_of_commands(app, name, page);
  sub->callback([&arguments, command] { arguments.command = command; });
  return sub;
}

void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("--socket", arguments.socket, "Control socket of the daemon")
      ->envname("EPD_CONTROL_SOCKET")
      ->type_name("PATH")
      ->check(check_socket_path)
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "JSON instead of text");
  app.add_option("--timeout-ms", arguments.timeout_ms, "How long to wait for each answer, 1..600000")
      ->type_name("MS")
      ->check(whole(1, kMaxTimeoutMs))
      ->capture_default_str();
}

void add_views(CLI::App& app, Arguments& arguments) {
  add_command(app, arguments, "status", Command::kStatus, help::kStatus);
  add_command(app, arguments, "devices", Command::kDevices, help::kDevices);
  add_command(app, arguments, "nodes", Command::kNodes, help::kNodes);
  add_command(app, arguments, "network", Command::kNetwork, help::kNetwork);
  add_command(app, arguments, "sessions", Command::kSessions, help::kSessions);
  CLI::App* groups = add_command(app, arguments, "groups", Command::kGroups, help::kGroups);
  groups->add_flag("--members", arguments.members, "List the members of each group too");
  add_command(app, arguments, "ops", Command::kOps, help::kOps);
  CLI::App* op = add_command(app, arguments, "op", Command::kOp, help::kOp);
  op->add_option("ID", arguments.operation, "As epctl ops prints it")
      ->type_name("OPERATION")
      ->check(utf8())
      ->check(refuse_operation)
      ->required();
  CLI::App* stats = add_command(app, arguments, "stats", Command::kStats, help::kStats);
  stats->add_flag("--ranks", arguments.ranks, "One line per rank of each group too");
  CLI::App* waits = add_command(app, arguments, "waits", Command::kWaits, help::kWaits);
  waits->add_option("GROUP", arguments.target, "Name, id or id:ID; default: all, without pairs of ranks")
      ->type_name("GROUP")
      ->check([](const std::string& name) {
        return name.empty() ? "is empty; allowed: a name, an id or id:ID" : "";
      })
      ->check(utf8());
  CLI::App* watch = add_command(app, arguments, "watch", Command::kWatch, help::kWatch);
  watch->add_option("--interval", arguments.interval_s, "Seconds between two looks, 0.05..3600")
      ->type_name("SECONDS")
      ->check(seconds(kMinIntervalS, kMaxIntervalS, "0.05..3600 seconds"))
      ->capture_default_str();
  watch->add_option("--count", arguments.count, "End after so many looks; default: until interrupted")
      ->type_name("N")
      ->check(whole(1, UINT32_MAX));
  CLI::App* events = add_command(app, arguments, "events", Command::kEvents, help::kEvents);
  events->add_flag("--follow", arguments.follow, "Go on with what happens from now on");
  events->add_option("--level", arguments.level, "Only events that are at least so important")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
  events->add_option("--since", arguments.since, "Only events after number N, or of the last 90s, 5m, 1h, 2d")
      ->type_name("N|TIME")
      ->check(refuse_since);
  events->add_option("--last", arguments.last, "Only the last N of those that are remembered")
      ->type_name("N")
      ->check(whole(1, UINT32_MAX));
  events->add_option("--group", arguments.group, "Only events of this group, by name, id or id:ID")
      ->type_name("GROUP")
      ->check(utf8());
  events->add_option("--node", arguments.node, "Only events of this node of the cluster")
      ->type_name("NODE")
      ->check(utf8());
  add_command(app, arguments, "config", Command::kConfig, help::kConfig);
  CLI::App* health = add_command(app, arguments, "health", Command::kHealth, help::kHealth);
  health->add_option("SUBSYSTEM", arguments.subsystem, "daemon, control, membership, cluster or device/NAME")
      ->type_name("SUBSYSTEM")
      ->check(utf8());
}

void add_set(CLI::App& app, Arguments& arguments) {
  CLI::App* set = add_group_of_commands(app, "set", help::kSet);
  set->require_subcommand(1);
  CLI::App* device = add_command(*set, arguments, "device", Command::kSetDevice, help::kSetDevice);
  device->add_option("NAME", arguments.target, "As epctl devices prints it")
      ->type_name("DEVICE")
      ->check(utf8())
      ->required();
  device->add_option("SETTING", arguments.settings, "What to set")->type_name("sms=N")->required();
  CLI::App* group = add_command(*set, arguments, "group", Command::kSetGroup, help::kSetGroup);
  group->add_option("GROUP", arguments.target, "Name, id or id:ID")
      ->type_name("GROUP")
      ->check(utf8())
      ->required();
  group->add_option("SETTING", arguments.settings, "What to set")
      ->type_name("sms=N|priority=N|linger_us=N")
      ->required();
  CLI::App* log = add_command(*set, arguments, "log", Command::kSetLog, help::kSetLog);
  log->add_option("SETTING", arguments.settings, "What to set")
      ->type_name("level=LEVELS")
      ->check(utf8())
      ->required();
  CLI::App* limits = add_command(*set, arguments, "limits", Command::kSetLimits, help::kSetLimits);
  limits->add_option("SETTING", arguments.settings, "What to set")
      ->type_name("LIMIT")
      ->check(utf8())
      ->required();
}

void add_evict(CLI::App& app, Arguments& arguments) {
  static std::string rank_word;  // of no further use
  CLI::App* evict = add_group_of_commands(app, "evict", help::kEvict);
  evict->require_subcommand(1);
  CLI::App* session = add_command(*evict, arguments, "session", Command::kEvictSession, help::kEvictSession);
  session->add_option("ID", arguments.session_id, "As epctl sessions prints it")
      ->type_name("SESSION")
      ->check(whole(0, UINT64_MAX))
      ->required();
  CLI::App* group = add_command(*evict, arguments, "group", Command::kEvictRank, help::kEvictGroup);
  group->add_option("GROUP", arguments.target, "Name, id or id:ID")
      ->type_name("GROUP")
      ->check(utf8())
      ->required();
  group->add_option("rank", rank_word, "The word \"rank\"")->required()->check(CLI::IsMember({"rank"}));
  group->add_option("RANK", arguments.rank, "Its number")
      ->type_name("N")
      ->check(whole(0, UINT32_MAX))
      ->required();
  for (CLI::App* command : {session, group}) {
    command->add_option("--reason", arguments.reason, "What clients are told: one line of up to 160 bytes")
        ->type_name("TEXT")
        ->check(utf8());
  }
}

void add_restart(CLI::App& app, Arguments& arguments) {
  CLI::App* restart = add_group_of_commands(app, "restart", help::kRestart);
  restart->require_subcommand(1);
  CLI::App* device =
      add_command(*restart, arguments, "device", Command::kRestartDevice, help::kRestartDevice);
  device->add_option("NAME", arguments.target, "As epctl devices prints it")
      ->type_name("DEVICE")
      ->check(utf8())
      ->required();
}

// Ranges are judged by the rules that the daemon has, see run_size.
void add_size(CLI::App& app, Arguments& arguments) {
  SizeArguments& group = arguments.size;
  CLI::App* size = add_command(app, arguments, "size", Command::kSize, help::kSize);
  const auto number = [size](const char* name, const char* field, std::uint32_t& value, const char* text) {
    return size->add_option(name, value, text)->type_name("N")->check(field_of_shape(field));
  };
  const auto word = [size](const char* name, std::string& value, const std::vector<std::string>& words,
                           const char* text) {
    size->add_option(name, value, text)->check(CLI::IsMember(words))->capture_default_str();
  };
  number("--ranks", "num_ranks", group.ranks, "num_ranks of the group")->required();
  number("--experts", "num_experts", group.experts, "num_experts, of all ranks")->required();
  number("--hidden", "hidden", group.hidden, "Elements of a row")->required();
  number("--tokens", "max_tokens", group.tokens, "max_tokens, of a rank in one operation")->required();
  number("--topk", "topk", group.topk, "Choices of a token")->required();
  number("--depth", "depth", group.depth, "Buffer slots")->capture_default_str();
  word("--payload", group.payload, payload_words(), "What rows are");
  word("--layout", group.layout, layout_words(), "How received rows lie");
  word("--index-type", group.index_type, index_type_words(), "Of topk_idx");
  word("--scale-format", group.scale_format, scale_format_words(), "Of FP8 rows");
  word("--scale-layout", group.scale_layout, scale_layout_words(), "Where scales of received rows lie");
  size->add_option("--more-formats", group.more_formats,
                   "Row formats that dispatches may choose in place of the first, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(row_format_words()));
  number("--expert-alignment", "expert_alignment", group.expert_alignment, "Rows")->capture_default_str();
  number("--opaque-bytes", "opaque_bytes", group.opaque_bytes, "Of a row, with payload opaque");
  number("--biases", "num_biases", group.biases, "Bias regions of combine");
  number("--handles", "num_handles", group.handles, "Routings that dispatches may keep");
  number("--max-recv-rows", "max_recv_rows", group.max_recv_rows,
         "Rows of recv_x and y; default: the worst case");
  size->add_option("--bound", group.bound, "Regions in memory of the client's, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember(region_words()));
  word("--device-kind", group.device_kind, device_kind_words(), "Of the devices");
}

}  // namespace

void build_grammar(CLI::App& app, Arguments& arguments) {
  app.footer(help::kProgramFooter);
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  add_options(app, arguments);
  add_views(app, arguments);
  add_set(app, arguments);
  add_command(app, arguments, "reload", Command::kReload, help::kReload);
  add_evict(app, arguments);
  add_restart(app, arguments);
  add_size(app, arguments);
  CLI::App* drain = add_command(app, arguments, "drain", Command::kDrain, help::kDrain);
  drain
      ->add_option("--timeout-ms", arguments.drain_ms,
                   "Time for sessions to end by themselves, 1..86400000; default: as configured")
      ->type_name("MS")
      ->check(whole(1, kMaxDrainMs));
  drain->add_flag("--wait", arguments.wait, "Return when the daemon has gone");
  CLI::App* doctor = add_command(app, arguments, "doctor", Command::kDoctor, help::kDoctor);
  doctor->add_flag("--strict", arguments.strict, "Warnings are problems too (exit code 4)");
  add_command(app, arguments, "version", Command::kVersion, help::kVersion);
  CLI::App* completion = add_command(app, arguments, "completion", Command::kCompletion, help::kCompletion);
  completion->add_option("SHELL", arguments.shell, "Whose script to print")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
}

}  // namespace epd::ctl
