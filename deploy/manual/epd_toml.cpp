// Prints epd.toml(5): every option, from the daemon's one table of options.
#include "supervisor/config.h"

#include <cstdio>
#include <string>

namespace {

// As roff reads it: no escapes, and no line that looks like a request.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

void print_option(const epd::supervisor::OptionInfo& option, const std::string& name) {
  std::printf(".TP\n.B %s\n%s\n", roff(name).c_str(), roff(option.help).c_str());
  std::printf("Default: %s. Allowed: %s.\n", roff("\"" + option.default_text + "\"").c_str(),
              roff(option.allowed).c_str());
  std::printf("%s\n", option.reloadable ? "A reload applies a new value." : "A new value needs a restart.");
  if (!option.environment.empty()) std::printf("Environment: %s.\n", roff(option.environment).c_str());
}

}  // namespace

// The page's text on settings without rows in the table of options.
constexpr const char* kRules =
    R"(.SS [[access.rule]]
Rules, as many as needed. The first one that is about a user decides everything about it. They are read again
on reload; who is attached stays.
.TP
.B users, unix_groups
Whom the rule is about: names or numbers of users, or of their groups. Neither: everybody.
.TP
.B attach
false: these may not attach at all.
.TP
.B groups
Groups of epd that they may join, with *, ? and [abc] as in a shell. Absent: all.
.TP
.B devices
Devices that they may use, likewise.
.TP
.B operate
In place of access.operate.
.TP
.B max_priority
In place of limits.max_priority.
.TP
.B max_sessions, max_groups, max_arena_bytes, max_routing_bytes
In place of the limits of the same name for one user.
.SH EXAMPLE
.nf
[devices]
cuda = [0, 1]
[[access.rule]]
users = ["alice", 1001]
devices = ["cuda:*"]
max_sessions = 8
.fi
.SH SEE ALSO
.BR epd (8),
.BR epctl (1)
)";

int main() {
  std::printf(".TH EPD.TOML 5 \"\" \"epd %s\" \"File Formats\"\n", EPD_VERSION);
  std::printf(".SH NAME\nepd.toml \\- configuration of the expert\\-parallel communication daemon\n");
  std::printf(
      ".SH SYNOPSIS\n.I /etc/epd/epd.toml\n.SH DESCRIPTION\n"
      "The file is TOML. Later sources win: built\\-in defaults, this file, the environment, flags of\n"
      ".BR epd (8).\n"
      "A key that is unknown, or a value that is not allowed, is refused by name. SIGHUP reads the file "
      "again:\n"
      "all of it is applied, or nothing, with the reason in the log.\n"
      ".B epd check\\-config\nchecks a file without a daemon.\n.SH OPTIONS\n");
  std::string section;
  for (const epd::supervisor::OptionInfo& option : epd::supervisor::config_options()) {
    const std::size_t dot = option.key.find('.');
    if (option.key.substr(0, dot) != section) {
      section = option.key.substr(0, dot);
      std::printf(".SS [%s]\n", section.c_str());
    }
    print_option(option, option.key.substr(dot + 1));
  }
  std::fputs(kRules, stdout);
}
