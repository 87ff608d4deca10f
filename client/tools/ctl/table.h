// Aligned plain-text tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace epd::ctl {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

// Clients choose some of what is printed: control characters are shown as \xNN, so that no text
// can drive the terminal. UTF-8 is left alone.
std::string printable(std::string_view text);

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns; missing ones are empty. An empty cell is shown as "-".
  void add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Title line and rows, columns two spaces apart, no trailing spaces.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace epd::ctl
