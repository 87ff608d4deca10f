// Completion in shells. The scripts know nothing: they ask `epctl complete -- WORDS...`, which reads the
// grammar, and the daemon for its names. So they can't go stale.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace epd::ctl {

// Names that the daemon knows now, for DEVICE, GROUP, SESSION or OPERATION; `socket` is "" unless the
// command line names one.
using Lister = std::function<std::vector<std::string>(const std::string& kind, const std::string& socket)>;

// What the last word, as far as it is typed, may become. A candidate that ends with '=' wants more.
std::vector<std::string> complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const Lister& list);

// The script of "bash", "zsh" or "fish".
const char* completion_script(const std::string& shell);

}  // namespace epd::ctl
