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

// What a command works with. Commands throw the Failure that ends them.
struct Context {
  const Arguments& arguments;
  Connection& connection;
  Output& output;

  // The whole answer: with --json the document, else the text.
  Exit answer(const Json& document, const std::string& text) const;
};

// The commands with a file of their own.
Exit run_set_device(const Context& context);
Exit run_set_group(const Context& context);
Exit run_set_log(const Context& context);
Exit run_set_limits(const Context& context);
Exit run_reload(const Context& context);
Exit run_evict_session(const Context& context);
Exit run_evict_group(const Context& context);
Exit run_restart_device(const Context& context);
Exit run_drain(const Context& context);
Exit run_doctor(const Context& context);
Exit run_size(const Context& context);  // needs no daemon
Exit run_events(const Context& context);
Exit run_watch(const Context& context);

Json to_json(const Failure& failure);
// "epctl: ..." on the error stream; with --json the document.
Exit report(const Arguments& arguments, Output& output, const Failure& failure);
void write_json(Output& output, const Json& document);
// Prints one of several JSON documents, on its own line.
void write_json_line(Output& output, const Json& document);

// The versions that this epctl was built from. Client libraries of the same build report the same.
v1::GetVersionResponse own_version();

[[noreturn]] void fail_usage(std::string message);

}  // namespace epd::ctl
