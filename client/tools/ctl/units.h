// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace epd::ctl {

std::string format_bytes(std::uint64_t bytes);      // "0 B", "4.0 KiB", "600.0 MiB"
std::string format_ms(std::uint64_t milliseconds);  // "850 ms", "12.3 s", "4 m 10 s", "1 h 2 m", "3 d 4 h"
std::string counted(std::uint64_t count, const std::string& noun);  // "1 session", "2 sessions"
std::string format_us(std::uint64_t microseconds);                  // "850 us", "1.5 ms", then as above

}  // namespace epd::ctl
