// Errors about a command line that epctl does not understand.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace epd::ctl {

// Whether the words contain --json. They need not be understood for that.
bool wants_json(int argc, char** argv);

// One line: what is wrong, and what is allowed.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error);

}  // namespace epd::ctl
