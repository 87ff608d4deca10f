// The command line's grammar: which words are allowed, where their values are kept, and what is said of
// others.
#pragma once

#include "arguments.h"

#include <CLI/CLI.hpp>
#include <string>

namespace epd::ctl {

// `arguments` must outlive the app. Values that the daemon knows carry these type names, from which
// completion knows what to ask it: DEVICE, GROUP, SESSION, OPERATION; "key=N" lists keys.
void build_grammar(CLI::App& app, Arguments& arguments);

// Whether the words contain --json. They need not be understood for that.
bool wants_json(int argc, char** argv);
// Why a command line is not understood, in one line: what is wrong, and what is allowed.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error);

}  // namespace epd::ctl
