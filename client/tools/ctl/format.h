// Text and JSON for the answers: numbers, lists, messages, tables.
#pragma once

#include <google/protobuf/generated_enum_reflection.h>
#include <google/protobuf/message.h>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace epd::ctl {

// Clients choose some of what is printed: control characters are shown as \xNN, so that no text
// can drive the terminal. UTF-8 is left alone.
std::string printable(std::string_view text);
// Appends an element to a list with commas.
void append(std::string& list, std::string_view element);

std::string format_bytes(std::uint64_t bytes);      // "0 B", "4.0 KiB", "600.0 MiB"
std::string format_ms(std::uint64_t milliseconds);  // "850 ms", "12.3 s", "4 m 10 s", "1 h 2 m", "3 d 4 h"
std::string format_us(std::uint64_t microseconds);  // "850 us", "1.5 ms", then as above
std::string counted(std::uint64_t count, const std::string& noun);  // "1 session", "2 sessions"

// Numbers on the command line are decimal, without leading zeros: 010 is refused and not read as 8. No value
// for other text, and for numbers above 2^64 - 1.
std::optional<std::uint64_t> parse_whole(std::string_view text);
// A duration as 90s, 5m, 1h or 2d, in milliseconds.
std::optional<std::uint64_t> parse_duration(std::string_view text);

// Each returns why `text` is refused; "" if it is allowed.
std::string refuse_whole(const std::string& text, std::uint64_t least, std::uint64_t most);
// For a number of 32 bits whose range is checked elsewhere. `allowed` names that range in words.
std::string refuse_whole(const std::string& text, const std::string& allowed);
// For the id of an operation, SESSION:TICKET.
std::string refuse_operation(const std::string& text);
// For seconds, which may have a fraction: "2", "0.5". `allowed` is the range in words.
std::string refuse_seconds(const std::string& text, double least, double most, const std::string& allowed);

// Messages as JSON: field names are the proto's, every field is present, 64-bit numbers are numbers,
// enumerators are lower-case words without their type ("DEVICE_STATE_READY" is "ready").

using Json = nlohmann::ordered_json;

Json to_json(const google::protobuf::Message& message);
// The value of one field; null if it is absent.
Json to_json(const google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field);

// A number that the schema lacks is "unspecified", as control.proto says.
std::string enum_word(const google::protobuf::EnumDescriptor& type, int number);

template <typename Enum>
std::string word(Enum value) {
  return enum_word(*google::protobuf::GetEnumDescriptor<Enum>(), static_cast<int>(value));
}

// Aligned plain-text tables.
enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns; missing ones are empty. An empty cell is shown as "-".
  void add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Title line and rows, columns two spaces apart, no trailing spaces. `if_empty`: in place of a table
  // without rows.
  std::string text(const std::string& if_empty) const { return empty() ? if_empty : text(); }
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// The field at a path ("shape.num_ranks") as people read it: its name tells the unit of a number. "" if it is
// absent.
std::string field_text(const google::protobuf::Message& message, std::string_view path);
bool field_is_number(const google::protobuf::Descriptor& type, std::string_view path);

// A column of messages: a field of theirs, or what a function makes of each.
template <typename Message>
struct FieldColumn {
  FieldColumn(std::string its_title, const char* path)
      : title(std::move(its_title)),
        text([path](const Message& message) { return field_text(message, path); }),
        align(field_is_number(*Message::descriptor(), path) ? Align::kRight : Align::kLeft) {}
  FieldColumn(std::string its_title, std::function<std::string(const Message&)> its_text, Align its_align)
      : title(std::move(its_title)), text(std::move(its_text)), align(its_align) {}

  std::string title;
  std::function<std::string(const Message&)> text;
  Align align;
};
template <typename Message>
using FieldColumns = std::vector<FieldColumn<Message>>;

template <typename Messages>
Table table_of(const Messages& messages, const FieldColumns<typename Messages::value_type>& columns) {
  std::vector<Column> titles;
  for (const auto& column : columns) titles.push_back({column.title, column.align});
  Table table(std::move(titles));
  for (const auto& message : messages) {
    std::vector<std::string> cells;
    for (const auto& column : columns) cells.push_back(column.text(message));
    table.add(std::move(cells));
  }
  return table;
}

}  // namespace epd::ctl
