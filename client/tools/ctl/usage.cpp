#include "usage.h"

#include "table.h"

#include <stdexcept>
#include <string_view>
#include <vector>

namespace epd::ctl {
namespace {

// The words that CLI11 takes for the value of a flag; one that it does not take asks for JSON too.
bool is_yes(const std::string& value) {
  try {
    return CLI::detail::to_flag_value(value) > 0;
  } catch (const std::exception&) {
    return true;
  }
}

const CLI::App& deepest_command(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().back();
  return *at;
}

std::string names_of_commands(const CLI::App& app) {
  std::string names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + sub->get_name();
  return names;
}

// "evict session"
std::string path_of(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  const bool top = parent == nullptr || parent->get_parent() == nullptr;
  return (top ? "" : path_of(*parent) + " ") + command.get_name();
}

// What may stand behind a command: "GROUP, --json".
std::string words_behind(const CLI::App& command) {
  std::string words;
  for (const CLI::App* at = &command; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      if (option == at->get_help_ptr() || option == at->get_version_ptr()) continue;
      const std::string word = option->get_positional() ? option->get_type_name() : option->get_name();
      words += (words.empty() ? "" : ", ") + word;
    }
  }
  return words;
}

// The prefix of a word; "" for the program itself.
std::string before_word(const CLI::App& app, const CLI::App& command) {
  return &command == &app ? "" : command.get_name() + " ";
}

}  // namespace

bool wants_json(int argc, char** argv) {
  constexpr std::string_view kWithValue = "--json=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return false;
    if (word == "--json") return true;
    if (word.starts_with(kWithValue) && is_yes(std::string(word.substr(kWithValue.size())))) return true;
  }
  return false;
}

std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = deepest_command(app);
  const std::string allowed = names_of_commands(command);
  const bool lacks_command = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !allowed.empty();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && allowed.empty()) {
    return path_of(command) + ": \"" + printable(app.remaining(true).front()) +
           "\" is not expected; allowed: " + words_behind(command);
  }
  if (!lacks_command) return (&command == &app ? "" : path_of(command) + ": ") + error.what();
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return command.get_name() + " needs a command; allowed: " + allowed;
  const char* kind = unknown.front().starts_with("-") ? "option" : "command";
  return std::string("unknown ") + kind + " \"" + before_word(app, command) + printable(unknown.front()) +
         "\"; allowed commands: " + allowed;
}

}  // namespace epd::ctl
