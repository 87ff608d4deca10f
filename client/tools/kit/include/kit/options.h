// Options of the tools: a value that is not allowed is refused, with those that are.
#pragma once

#include "kit/error.h"
#include "kit/report.h"
#include "proto/shape_rules.h"

#include <CLI/CLI.hpp>

#include <charconv>
#include <cstdio>
#include <string>
#include <type_traits>

namespace epd::kit {

// Accepts one of the words; any other is refused with the list.
template <typename Value, std::size_t n>
CLI::Option* add_word(CLI::App& app, const std::string& name, Value& value, const Word<Value> (&words)[n],
                      const std::string& help) {
  const auto take = [&value, &words](const std::string& given) {
    for (const auto& [word, its] : words) {
      if (given == word) value = its;
    }
  };
  const auto check = [name, &words](const std::string& given) -> std::string {
    std::string list;
    for (const auto& [word, its] : words) {
      if (given == word) return "";
      list += (list.empty() ? "" : ", ") + std::string(word);
    }
    return name.substr(2) + " '" + given + "' is not served; allowed: " + list;
  };
  return app.add_option_function<std::string>(name, take, help)
      ->check(CLI::Validator(check, ""))
      ->default_str(word_of(words, value));
}

// CLI11 by itself cuts what does not fit, and does not say what is allowed.
template <typename Number>
CLI::Validator whole(Number low, Number high, std::string allowed) {
  auto check = [low, high, allowed = std::move(allowed)](std::string& text) -> std::string {
    Number value = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    const bool fits = error == std::errc() && rest == end && value >= low && value <= high;
    if (!fits) return "\"" + text + "\" is refused; allowed: " + allowed;
    text = std::to_string(value);  // CLI11 reads 010 as 8
    return "";
  };
  return {check, ""};
}

template <typename Number>
CLI::Option* add_number(CLI::App& app, const std::string& name, Number& value,
                        std::type_identity_t<Number> low, std::type_identity_t<Number> high,
                        const std::string& help) {
  return app.add_option(name, value, help)
      ->check(whole(low, high, std::to_string(low) + ".." + std::to_string(high)))
      ->capture_default_str();
}

// Takes any 32-bit number: check_shape decides which are allowed.
inline CLI::Option* add_field(CLI::App& app, const std::string& name, std::uint32_t& value, const char* field,
                              const std::string& help) {
  return app.add_option(name, value, help)
      ->check(whole<std::uint32_t>(0, UINT32_MAX, abi::allowed_values(abi::shape_field(field))))
      ->capture_default_str();
}

// Parses the command line and calls `validate`, which throws ToolError. Returns false when there is nothing
// to run because help or the reason was printed; `exit_code` is 0 for help.
template <typename Validate>
bool parse(CLI::App& app, int argc, char** argv, int& exit_code, Validate validate) {
  try {
    app.parse(argc, argv);
    validate();
    return true;
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error) == 0 ? 0 : 2;
  } catch (const ToolError& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), error.what());
    exit_code = 2;
  }
  return false;
}

}  // namespace epd::kit
