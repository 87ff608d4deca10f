#include "text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>

namespace epd::ctl {
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

// -1 for what is no number.
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

}  // namespace epd::ctl
