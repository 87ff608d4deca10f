// What is said of a command line that is not understood.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace epd::ctl {

// Whether the words ask for JSON, as far as can be told without understanding all of them.
bool wants_json(int argc, char** argv);

// One line: what is wrong, and what is allowed.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error);

}  // namespace epd::ctl
