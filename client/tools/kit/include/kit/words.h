#pragma once

#include <cstddef>

namespace epd::kit {

// The words of the command line and of --json for a value.
template <typename Value>
struct Word {
  const char* word;
  Value value;
};
template <typename Value, std::size_t n>
const char* word_of(const Word<Value> (&words)[n], Value value) {
  for (const auto& [word, its] : words) {
    if (its == value) return word;
  }
  return "";
}

}  // namespace epd::kit
