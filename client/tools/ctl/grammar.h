// The command line's grammar: which words are allowed, and where their values are kept.
#pragma once

#include "arguments.h"

#include <CLI/CLI.hpp>

namespace epd::ctl {

// `arguments` must outlive the app. Values that the daemon knows carry these type names, from which
// completion knows what to ask it: DEVICE, GROUP, SESSION, OPERATION; "key=N" lists keys.
void build_grammar(CLI::App& app, Arguments& arguments);

}  // namespace epd::ctl
