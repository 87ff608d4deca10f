// Numbers as people read and write them, and text that no terminal obeys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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

// Each says why `text` is refused; empty if it is not.
std::string refuse_whole(const std::string& text, std::uint64_t least, std::uint64_t most);
// A number of 32 bits, whose range others judge: `allowed` is that range in words.
std::string refuse_whole(const std::string& text, const std::string& allowed);
// SESSION:TICKET, the id of an operation.
std::string refuse_operation(const std::string& text);
// Seconds, which may have a fraction: "2", "0.5". `allowed` is the range in words.
std::string refuse_seconds(const std::string& text, double least, double most, const std::string& allowed);

}  // namespace epd::ctl
