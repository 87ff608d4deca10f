// Runs one command: asks the daemon, writes the answer.
#pragma once

#include "arguments.h"
#include "connection.h"
#include "json.h"

#include <iosfwd>

namespace epd::ctl {

struct Output {
  std::ostream& out;      // the answer
  std::ostream& error;    // failures and progress, for people
  bool colour = false;    // `out` is a terminal that shows colours
  bool terminal = false;  // `out` is a terminal
};

Exit run(const Arguments& arguments, Output& output);

// The commands with a file of their own.
Exit run_drain(const Arguments& arguments, Connection& connection, Output& output);
Exit run_doctor(const Arguments& arguments, Connection& connection, Output& output);
Exit run_size(const Arguments& arguments, Output& output);  // needs no daemon

Exit run_events(const Arguments& arguments, Connection& connection, Output& output);
Exit run_watch(const Arguments& arguments, Connection& connection, Output& output);
Exit run_set(const Arguments& arguments, Connection& connection, Output& output);
Exit run_health(const Arguments& arguments, Connection& connection, Output& output);
Exit run_reload(const Arguments& arguments, Connection& connection, Output& output);
Exit run_restart(const Arguments& arguments, Connection& connection, Output& output);
Exit run_evict(const Arguments& arguments, Connection& connection, Output& output);

// "epctl: ..." on the error stream; with --json also the document.
Exit report(const Arguments& arguments, Output& output, const Failure& failure);
Json failure_json(const Failure& failure);
void write_json(Output& output, const Json& document);
// Prints one of several JSON documents, on its own line.
void write_json_line(Output& output, const Json& document);

}  // namespace epd::ctl
