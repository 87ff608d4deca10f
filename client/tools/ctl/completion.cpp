#include "grammar.h"

#include <algorithm>

namespace epd::ctl {
namespace {

struct Place {
  const CLI::App* app = nullptr;
  const CLI::Option* awaits_value = nullptr;  // the last word is its value
  std::size_t positional = 0;                 // of `app`, that the last word would be
  std::string socket;
};

bool takes_value(const CLI::Option& option) {
  return option.get_expected_max() > 0 && option.get_type_size_max() > 0;
}

// In this command or, because they fall through, in those above it.
const CLI::Option* find_option(const CLI::App* app, const std::string& name) {
  for (; app != nullptr; app = app->get_parent()) {
    if (const CLI::Option* option = app->get_option_no_throw(name)) return option;
  }
  return nullptr;
}

const CLI::App* find_command(const CLI::App& app, const std::string& name) {
  const auto found = app.get_subcommands([&](const CLI::App* sub) { return sub->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

Place find_place(const CLI::App& app, const std::vector<std::string>& words) {
  Place place;
  place.app = &app;
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    const std::string& word = words[i];
    if (place.awaits_value != nullptr) {
      if (place.awaits_value->check_lname("socket")) place.socket = word;
      place.awaits_value = nullptr;
    } else if (word.starts_with("-")) {
      const std::size_t equals = word.find('=');
      const CLI::Option* option = find_option(place.app, word.substr(0, equals));
      if (option == nullptr || !takes_value(*option)) continue;
      if (equals == std::string::npos) {
        place.awaits_value = option;
      } else if (option->check_lname("socket")) {
        place.socket = word.substr(equals + 1);
      }
    } else if (const CLI::App* sub = find_command(*place.app, word)) {
      place.app = sub;
      place.positional = 0;
    } else {
      ++place.positional;
    }
  }
  return place;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::string> values(const CLI::Option& option, const std::string& socket, const Lister& list) {
  const std::string type = option.get_type_name();
  if (type == "DEVICE" || type == "GROUP" || type == "SESSION" || type == "OPERATION" ||
      type == "SUBSYSTEM" || type == "LIMIT")
    return list(type, socket);
  // IsMember describes itself as "TEXT:{bash,zsh,fish}".
  if (const std::size_t brace = type.find('{'); brace != std::string::npos)
    return split(type.substr(brace + 1, type.find('}') - brace - 1), ',');
  std::vector<std::string> keys;
  for (const std::string& part : split(type, '|')) {
    if (const std::size_t equals = part.find('='); equals != std::string::npos)
      keys.push_back(part.substr(0, equals + 1));
  }
  return keys;
}

std::vector<std::string> option_names(const CLI::App* app) {
  std::vector<std::string> names;
  for (; app != nullptr; app = app->get_parent()) {
    for (const CLI::Option* option : app->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

std::vector<std::string> complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const Lister& list) {
  const std::string typed = words.empty() ? "" : words.back();
  const Place place = find_place(app, words);
  std::vector<std::string> candidates;
  if (place.awaits_value != nullptr) {
    candidates = values(*place.awaits_value, place.socket, list);
  } else if (typed.starts_with("-")) {
    candidates = option_names(place.app);
  } else {
    for (const CLI::App* sub : place.app->get_subcommands([](const CLI::App*) { return true; }))
      candidates.push_back(sub->get_name());
    std::vector<const CLI::Option*> positionals;
    for (const CLI::Option* option : place.app->get_options()) {
      if (option->get_positional()) positionals.push_back(option);
    }
    if (!positionals.empty()) {
      const CLI::Option& option = *positionals[std::min(place.positional, positionals.size() - 1)];
      const bool repeated = option.get_expected_max() > 1;
      if (place.positional < positionals.size() || repeated) candidates = values(option, place.socket, list);
    }
  }
  std::erase_if(candidates, [&](const std::string& candidate) { return !candidate.starts_with(typed); });
  return candidates;
}

const char* completion_script(const std::string& shell) {
  if (shell == "zsh") {
    return R"SCRIPT(#compdef epctl
_epctl() {
  local -a candidates
  candidates=("${(@f)$("${words[1]}" complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  candidates=("${(@)candidates:#}")
  compadd -S '' -- "${(@M)candidates:#*=}"
  compadd -- "${(@)candidates:#*=}"
}
if [ "$funcstack[1]" = "_epctl" ]; then
  _epctl "$@"
else
  compdef _epctl epctl
fi
)SCRIPT";
  }
  if (shell == "fish") {
    return R"SCRIPT(function __epctl_complete
  set -l words (commandline -opc) (commandline -ct)
  $words[1] complete -- $words[2..-1] 2>/dev/null
end
complete -c epctl -f -a '(__epctl_complete)'
)SCRIPT";
  }
  return R"SCRIPT(# bash completion of epctl
_epctl() {
  local line=${COMP_LINE:0:COMP_POINT}
  local -a words
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  local typed=${words[${#words[@]}-1]} prefix="" IFS=$'\n'
  COMPREPLY=($("${words[0]}" complete -- "${words[@]:1}" 2>/dev/null))
  # Readline has broken the word at the last ':' or '=' and replaces only what follows.
  if [[ $COMP_WORDBREAKS == *:* ]]; then prefix=${typed%"${typed##*[:=]}"}; fi
  if [[ -n $prefix ]]; then COMPREPLY=("${COMPREPLY[@]#"$prefix"}"); fi
  if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _epctl epctl
)SCRIPT";
}

}  // namespace epd::ctl
