#include "format.h"

#include <google/protobuf/descriptor.h>
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <map>
#include <utility>

namespace epd::ctl {

// ---- text

namespace {

constexpr std::uint64_t kMinutesPerDay = 1440;

std::string one_decimal(double value, const char* unit) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", value, unit);
  return text.data();
}

std::string pair(std::uint64_t large, const char* large_unit, std::uint64_t small, const char* small_unit) {
  return std::to_string(large) + " " + large_unit + " " + std::to_string(small) + " " + small_unit;
}

bool all_digits(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool has_leading_zero(std::string_view digits) {
  return digits.size() > 1 && digits.front() == '0';
}

std::string refusal(const std::string& text, const std::string& allowed) {
  return "\"" + printable(text) + "\" is refused; allowed: " + allowed + ", decimal without leading zeros";
}

// Returns -1 for text that is no number.
double parse_seconds(std::string_view text) {
  const std::size_t point = std::min(text.find('.'), text.size());
  const std::string_view whole = text.substr(0, point);
  const std::string_view fraction = text.substr(std::min(point + 1, text.size()));
  if (!all_digits(whole) || !all_digits(fraction) || has_leading_zero(whole)) return -1;
  double seconds = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  return error == std::errc() && end == text.data() + text.size() ? seconds : -1;
}

}  // namespace

std::string printable(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // C2 80..9F are the C1 controls, which terminals obey too.
    const bool c1 = byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (byte >= 0x20 && byte != 0x7f && !c1) {
      out += text[i];
      continue;
    }
    const unsigned value = c1 ? static_cast<unsigned char>(text[++i]) : byte;
    out += "\\x";
    out += kHex[value >> 4];
    out += kHex[value & 0xfu];
  }
  return out;
}

void append(std::string& list, std::string_view element) {
  if (!list.empty()) list += ", ";
  list += element;
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  static constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return one_decimal(value, kUnits[unit]);
}

std::string format_ms(std::uint64_t milliseconds) {
  if (milliseconds < 1000) return std::to_string(milliseconds) + " ms";
  if (milliseconds < 59'950) return one_decimal(static_cast<double>(milliseconds) / 1000, "s");
  const std::uint64_t seconds = (milliseconds + 500) / 1000;
  if (seconds < 3600) return pair(seconds / 60, "m", seconds % 60, "s");
  const std::uint64_t minutes = seconds / 60;
  if (minutes < kMinutesPerDay) return pair(minutes / 60, "h", minutes % 60, "m");
  return pair(minutes / (kMinutesPerDay), "d", minutes / 60 % 24, "h");
}

std::string format_us(std::uint64_t microseconds) {
  if (microseconds < 1000) return std::to_string(microseconds) + " us";
  if (microseconds < 999'950) return one_decimal(static_cast<double>(microseconds) / 1000, "ms");
  return format_ms(microseconds / 1000);
}

std::string counted(std::uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::optional<std::uint64_t> parse_whole(std::string_view text) {
  if (text.empty() || !all_digits(text) || has_leading_zero(text)) return std::nullopt;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  return number;
}

std::string refuse_whole(const std::string& text, std::uint64_t least, std::uint64_t most) {
  const std::optional<std::uint64_t> number = parse_whole(text);
  if (number && *number >= least && *number <= most) return "";
  return refusal(text, std::to_string(least) + ".." + std::to_string(most));
}

std::string refuse_whole(const std::string& text, const std::string& allowed) {
  const std::optional<std::uint64_t> number = parse_whole(text);
  return number && *number <= UINT32_MAX ? "" : refusal(text, allowed);
}

std::string refuse_operation(const std::string& text) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  const std::string_view ticket = std::string_view(text).substr(std::min(colon + 1, text.size()));
  if (parse_whole(std::string_view(text).substr(0, colon)) && parse_whole(ticket)) return "";
  return "\"" + printable(text) + "\" is refused; allowed: SESSION:TICKET, as epctl ops prints it";
}

std::optional<std::uint64_t> parse_duration(std::string_view text) {
  constexpr std::uint64_t kMost = 100'000;
  if (text.empty()) return std::nullopt;
  const std::optional<std::uint64_t> count = parse_whole(text.substr(0, text.size() - 1));
  if (!count || *count > kMost) return std::nullopt;
  switch (text.back()) {
    case 's': return *count * 1'000;
    case 'm': return *count * 60'000;
    case 'h': return *count * 3'600'000;
    case 'd': return *count * 86'400'000;
    default: return std::nullopt;
  }
}

std::string refuse_seconds(const std::string& text, double least, double most, const std::string& allowed) {
  const double seconds = parse_seconds(text);
  if (seconds >= least && seconds <= most) return "";
  return refusal(text, allowed);
}

// ---- json

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Values of the enum DeviceState begin with DEVICE_STATE.
std::size_t prefix_length(const std::string& type_name) {
  std::size_t length = type_name.size() + 1;
  for (std::size_t i = 1; i < type_name.size(); ++i)
    if (std::isupper(static_cast<unsigned char>(type_name[i])) != 0) ++length;
  return length;
}

// `i` is the index in a repeated field; -1: the field has one value.
Json value_of(const Message& m, const FieldDescriptor& field, int i) {
  const google::protobuf::Reflection& r = *m.GetReflection();
  const FieldDescriptor* const f = &field;
  const bool one = i < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return one ? r.GetInt32(m, f) : r.GetRepeatedInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_INT64: return one ? r.GetInt64(m, f) : r.GetRepeatedInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT32: return one ? r.GetUInt32(m, f) : r.GetRepeatedUInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT64: return one ? r.GetUInt64(m, f) : r.GetRepeatedUInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_DOUBLE: return one ? r.GetDouble(m, f) : r.GetRepeatedDouble(m, f, i);
    case FieldDescriptor::CPPTYPE_FLOAT: return one ? r.GetFloat(m, f) : r.GetRepeatedFloat(m, f, i);
    case FieldDescriptor::CPPTYPE_BOOL: return one ? r.GetBool(m, f) : r.GetRepeatedBool(m, f, i);
    case FieldDescriptor::CPPTYPE_STRING: return one ? r.GetString(m, f) : r.GetRepeatedString(m, f, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return enum_word(*field.enum_type(), one ? r.GetEnumValue(m, f) : r.GetRepeatedEnumValue(m, f, i));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return to_json(one ? r.GetMessage(m, f) : r.GetRepeatedMessage(m, f, i));
  }
  return nullptr;
}

}  // namespace

std::string enum_word(const google::protobuf::EnumDescriptor& type, int number) {
  const auto* value = type.FindValueByNumber(number);
  if (value == nullptr) return "unspecified";
  std::string name = value->name().substr(prefix_length(type.name()));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

Json to_json(const Message& message, const FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  if (!field.is_repeated()) {
    if (field.has_presence() && !reflection.HasField(message, &field)) return nullptr;
    return value_of(message, field, -1);
  }
  Json list = Json::array();
  std::map<std::string, Json> entries;  // of a map, ordered by key
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    Json value = value_of(message, field, i);
    if (field.is_map()) {
      entries[value["key"]] = std::move(value["value"]);
    } else {
      list.push_back(std::move(value));
    }
  }
  return field.is_map() ? Json(entries) : list;
}

Json to_json(const Message& message) {
  Json object = Json::object();
  const auto& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i)
    object[descriptor.field(i)->name()] = to_json(message, *descriptor.field(i));
  return object;
}

// ---- table

namespace {

// Counts code points. Those are columns in the scripts that names here are written in.
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

// The last field of a path, and the message that has it. The message is null if one on the way is absent.
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
