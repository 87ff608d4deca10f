// Users and groups of this system, by name or by number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace epd {

inline constexpr std::uint32_t kMaxAccountId = 0xffff'fffe;  // the last one means "none"

// Looks for a name, then for a number. No value: neither exists. Asks the name service, which may be slow:
// not on a loop.
std::optional<std::uint32_t> find_user_id(const std::string& name_or_number);
std::optional<std::uint32_t> find_group_id(const std::string& name_or_number);

}  // namespace epd
