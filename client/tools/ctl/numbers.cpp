#include "numbers.h"

#include "table.h"

#include <algorithm>
#include <charconv>

namespace epd::ctl {
namespace {

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
