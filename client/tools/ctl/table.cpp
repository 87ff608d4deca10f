#include "table.h"

#include "json.h"
#include "text.h"

#include <google/protobuf/descriptor.h>
#include <algorithm>
#include <cstddef>
#include <utility>

namespace epd::ctl {
namespace {

// Code points, which is columns for the scripts that names here are written in.
std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }));
}

void append_line(std::string& out, const std::vector<Column>& columns, const std::vector<std::size_t>& widths,
                 const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const std::string padding(widths[i] - width(cells[i]), ' ');
    if (i != 0) line += "  ";
    line += columns[i].align == Align::kRight ? padding + cells[i] : cells[i] + padding;
  }
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + '\n';
}

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The last field of a path, and the message that has it; no message if one on the way is absent.
struct Field {
  const Message* message;
  const FieldDescriptor* descriptor;
};
Field find_field(const Message* message, const google::protobuf::Descriptor* type, std::string_view path) {
  const std::size_t dot = path.find('.');
  const FieldDescriptor* const field = type->FindFieldByName(std::string(path.substr(0, dot)));
  if (field == nullptr) std::abort();  // a table names what the schema lacks
  if (dot == std::string_view::npos) return {message, field};
  const bool there = message != nullptr && message->GetReflection()->HasField(*message, field);
  return find_field(there ? &message->GetReflection()->GetMessage(*message, field) : nullptr,
                    field->message_type(), path.substr(dot + 1));
}

std::string number_text(std::string_view name, std::uint64_t value) {
  if (name.ends_with("_bytes") || name.starts_with("bytes_")) return format_bytes(value);
  if (name.ends_with("_ms")) return format_ms(value);
  if (name.ends_with("_us") || name == "us") return format_us(value);
  return name.ends_with("pid") && value == 0 ? "" : std::to_string(value);
}

std::string text_of(std::string_view name, const Json& value) {
  if (value.is_number_unsigned()) return number_text(name, value);
  if (value.is_number_integer())
    return value < 0 ? std::to_string(value.get<std::int64_t>()) : number_text(name, value);
  if (value.is_boolean()) return value ? "yes" : "no";
  if (value.is_string()) return value;
  std::string list;
  if (value.is_array()) {
    for (const Json& element : value) append(list, text_of(name, element));
  }
  return list;
}

}  // namespace

std::string field_text(const Message& message, std::string_view path) {
  const Field field = find_field(&message, message.GetDescriptor(), path);
  if (field.message == nullptr) return "";
  return text_of(field.descriptor->name(), to_json(*field.message, *field.descriptor));
}

bool field_is_number(const google::protobuf::Descriptor& type, std::string_view path) {
  const FieldDescriptor& field = *find_field(nullptr, &type, path).descriptor;
  return !field.is_repeated() && field.cpp_type() <= FieldDescriptor::CPPTYPE_FLOAT;
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = cell.empty() ? "-" : printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::string> titles;
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    widths.push_back(width(column.title));
  }
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string out;
  append_line(out, columns_, widths, titles);
  for (const auto& row : rows_) append_line(out, columns_, widths, row);
  return out;
}

}  // namespace epd::ctl
