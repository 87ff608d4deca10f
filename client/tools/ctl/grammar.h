// The command line's grammar: the words that are allowed, where their values are kept, the messages for other
// words, the help texts, and completion.
#pragma once

#include "arguments.h"

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace epd::ctl {

// `arguments` must outlive the app. Values that the daemon knows carry these type names, from which
// completion knows what to ask it: DEVICE, GROUP, SESSION, OPERATION; "key=N" lists keys.
void build_grammar(CLI::App& app, Arguments& arguments);

// Whether the words contain --json. They need not be understood for that.
bool wants_json(int argc, char** argv);
// Why a command line is not understood, in one line: what is wrong, and what is allowed.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error);

// The texts of --help, which the manual page is made of: help.txt, in which "== COMMAND: SUMMARY" begins a
// page.
namespace help {

extern const char* const kText;

struct Page {
  std::string summary;  // one line, for the list of commands
  std::string text;     // below the options
};
// `command`: "set device"; also "epctl" and "footer", which have no summary.
Page page(const std::string& command);

}  // namespace help

// Completion in shells. The scripts know nothing: they ask `epctl complete -- WORDS...`, which reads the
// grammar, and the daemon for its names. So they can't go stale.

// Names that the daemon knows now, for DEVICE, GROUP, SESSION or OPERATION; `socket` is "" unless the
// command line names one.
using Lister = std::function<std::vector<std::string>(const std::string& kind, const std::string& socket)>;

// Words that the last word, as far as it is typed, may become. A candidate that ends with '=' wants more.
std::vector<std::string> complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const Lister& list);

// The script of "bash", "zsh" or "fish".
const char* completion_script(const std::string& shell);

}  // namespace epd::ctl
