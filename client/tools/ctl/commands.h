// Runs one command: asks the daemon, writes the answer.
#pragma once

#include "arguments.h"
#include "connection.h"
#include "epd/v1/control.pb.h"
#include "format.h"

#include <google/protobuf/descriptor.h>
#include <iosfwd>
#include <string>
#include <vector>

namespace epd::ctl {

struct Output {
  std::ostream& out;      // the answer
  std::ostream& error;    // failures and progress, for people
  bool colour = false;    // `out` is a terminal that shows colours
  bool terminal = false;  // `out` is a terminal
};

Exit run(const Arguments& arguments, Output& output);

// The surroundings of a command. Commands throw the Failure that ends them.
struct Context {
  const Arguments& arguments;
  Connection& connection;
  Output& output;

  // Writes the whole answer: with --json the document, else the text.
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

// The words for the values of a field, in the order of their numbers: those of the schema's enum, as in JSON.
template <typename Enum>
std::vector<std::string> words_of() {
  std::vector<std::string> words;
  const auto& type = *google::protobuf::GetEnumDescriptor<Enum>();
  for (int i = 1; i < type.value_count(); ++i) words.push_back(enum_word(type, type.value(i)->number()));
  return words;
}
// PAYLOAD, or PAYLOAD:SCALE_FORMAT unless the format is float32.
std::vector<std::string> row_format_words();

// The index of a word, which must be one of them.
std::uint32_t number_of(const std::vector<std::string>& words, const std::string& word);

}  // namespace epd::ctl
