// Aligned plain-text tables.
#pragma once

#include <google/protobuf/message.h>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace epd::ctl {

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
