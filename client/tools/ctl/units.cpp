#include "units.h"

#include <array>
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

}  // namespace

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

}  // namespace epd::ctl
