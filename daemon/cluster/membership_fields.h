// One list of fields for both directions: carry(io, message, value) names each field of a message and where
// it belongs in the value. A Writer fills the message, a Reader judges the message and fills the value.
#pragma once

#include "common/status.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace epd::cluster {

class Writer {
 public:
  template <typename Value, typename Wire, typename Set>
  void number(const char*, Value& value, std::int64_t, std::uint64_t, Wire, const Set& set) {
    set(static_cast<Wire>(value));
  }
  template <typename Set>
  void text(const char*, std::string& value, std::size_t most, const std::string&, const Set& set) {
    set(printable(value, most));
  }
  template <std::size_t N, typename Set>
  void text(const char*, char (&value)[N], std::size_t most, const std::string&, const Set& set) {
    set(printable(std::string(value, std::find(value, value + N, '\0')), most));
  }
  template <typename Set>
  void bytes(const char*, std::string& value, std::size_t, const std::string&, const Set& set) {
    set(value);
  }
  template <typename Wire, typename Value>
  void part(const char*, Wire& wire, Value& value) {
    carry(*this, wire, value);
  }
  template <typename List, typename Value>
  void list(const char*, List& list, std::vector<Value>& values, std::size_t) {
    for (Value& value : values) carry(*this, *list.Add(), value);
  }
  template <typename List, typename Value>
  void numbers(const char*, List& list, std::vector<Value>& values, std::size_t, std::uint64_t) {
    list.Add(values.begin(), values.end());
  }
  template <typename Check>
  void judge(const Check&) {}

 private:
  static std::string printable(const std::string& text, std::size_t most) {
    std::string fine = text.substr(0, most);
    for (char& c : fine) c = c >= 0x20 && c < 0x7f ? c : '?';
    return fine;
  }
};

class Reader {
 public:
  // Of what has been read: the first thing that was wrong.
  const Status& status() const { return status_; }

  template <typename Value, typename Wire, typename Set>
  void number(const char* name, Value& value, std::int64_t low, std::uint64_t most, Wire wire, const Set&) {
    const bool below = std::is_signed_v<Wire> && static_cast<std::int64_t>(wire) < low;
    const bool negative = std::is_signed_v<Wire> && static_cast<std::int64_t>(wire) < 0;
    if (below || (!negative && static_cast<std::uint64_t>(wire) > most)) {
      refuse(name, std::to_string(wire), std::to_string(low) + " .. " + std::to_string(most));
    } else {
      value = static_cast<Value>(wire);
    }
  }
  template <typename Set>
  void text(const char* name, std::string& value, std::size_t most, const std::string& wire, const Set&) {
    if (judge_text(name, wire, most)) value = wire;
  }
  template <std::size_t N, typename Set>
  void text(const char* name, char (&value)[N], std::size_t, const std::string& wire, const Set&) {
    if (!judge_text(name, wire, N - 1)) return;
    std::fill(std::copy(wire.begin(), wire.end(), value), value + N, '\0');
  }
  template <typename Set>
  void bytes(const char* name, std::string& value, std::size_t most, const std::string& wire, const Set&) {
    if (wire.size() > most) {
      refuse(name, "of " + std::to_string(wire.size()) + " bytes", "at most " + std::to_string(most));
    } else {
      value = wire;
    }
  }
  template <typename Wire, typename Value>
  void part(const char* name, Wire& wire, Value& value) {
    path_.emplace_back(name);
    carry(*this, wire, value);
    path_.pop_back();
  }
  template <typename List, typename Value>
  void list(const char* name, List& list, std::vector<Value>& values, std::size_t most) {
    if (!judge_size(name, list.size(), most)) return;
    values.resize(static_cast<std::size_t>(list.size()));
    for (int i = 0; i < list.size() && status_.ok(); ++i)
      part(name, *list.Mutable(i), values[static_cast<std::size_t>(i)]);
  }
  template <typename List, typename Value>
  void numbers(const char* name, List& list, std::vector<Value>& values, std::size_t size,
               std::uint64_t most) {
    if (!judge_size(name, list.size(), size)) return;
    for (const auto number : list) this->number(name, values.emplace_back(), 0, most, number, nullptr);
  }
  // `check` says what is wrong, or nothing.
  template <typename Check>
  void judge(const Check& check) {
    if (!status_.ok()) return;
    if (const std::string wrong = check(); !wrong.empty()) status_ = invalid_argument(path() + wrong);
  }
  void refuse(const char* name, const std::string& value, const std::string& allowed) {
    if (status_.ok()) status_ = invalid_argument(path() + name + " is " + value + "; allowed: " + allowed);
  }

 private:
  bool judge_text(const char* name, const std::string& wire, std::size_t most) {
    const auto bad =
        std::find_if(wire.begin(), wire.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; });
    if (wire.size() > most) {
      refuse(name, "of " + std::to_string(wire.size()) + " characters", "at most " + std::to_string(most));
    } else if (bad != wire.end()) {
      refuse(name, "text with the byte " + std::to_string(static_cast<unsigned char>(*bad)), "32 .. 126");
    }
    return wire.size() <= most && bad == wire.end();
  }
  bool judge_size(const char* name, int size, std::size_t most) {
    if (static_cast<std::size_t>(size) <= most) return true;
    refuse(name, "a list of " + std::to_string(size), "at most " + std::to_string(most));
    return false;
  }
  std::string path() const {
    std::string text;
    for (const std::string_view name : path_) text += std::string(name) + ".";
    return text;
  }

  Status status_;
  std::vector<std::string_view> path_;
};

// In carry(io, m, v): the field of m, and where it belongs. Undefined again at the end of a file that has
// lists.
#define EPD_INTEGER(field, value, low, most) \
  io.number(#field, value, low, most, m.field(), [&](auto x) { m.set_##field(x); })
#define EPD_NUMBER(field, value, most) EPD_INTEGER(field, value, 0, most)
#define EPD_TEXT(field, value, most) \
  io.text(#field, value, most, m.field(), [&](std::string x) { m.set_##field(std::move(x)); })
#define EPD_CHARS(field, value) EPD_TEXT(field, value, sizeof(value) - 1)
#define EPD_BYTES(field, value, most) \
  io.bytes(#field, value, most, m.field(), [&](const std::string& x) { m.set_##field(x); })
#define EPD_PART(field, value) io.part(#field, *m.mutable_##field(), value)
#define EPD_LIST(field, value, most) io.list(#field, *m.mutable_##field(), value, most)
#define EPD_NUMBERS(field, value, size, most) io.numbers(#field, *m.mutable_##field(), value, size, most)

}  // namespace epd::cluster
