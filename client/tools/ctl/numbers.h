// Numbers on the command line. Decimal only, so 010 is refused and not read as 8.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace epd::ctl {

// Decimal digits only, without leading zeros. No value for other text, and for numbers above 2^64 - 1.
std::optional<std::uint64_t> parse_whole(std::string_view text);

// Why `text` is no whole number from `least` to `most`; empty if it is one.
std::string refuse_whole(const std::string& text, std::uint64_t least, std::uint64_t most);
// The same of a number of 32 bits, whose range others judge: `allowed` is that range in words.
std::string refuse_whole(const std::string& text, const std::string& allowed);

// SESSION:TICKET, the id of an operation.
std::string refuse_operation(const std::string& text);

// A duration as 90s, 5m, 1h or 2d, in milliseconds.
std::optional<std::uint64_t> parse_duration(std::string_view text);

// Seconds, which may have a fraction: "2", "0.5". `allowed` is the range in words.
std::string refuse_seconds(const std::string& text, double least, double most, const std::string& allowed);

}  // namespace epd::ctl
