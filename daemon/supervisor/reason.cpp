#include "reason.h"

#include "base/utf8.h"

#include <cstdint>
#include <cstdio>
#include <string_view>

namespace epd::supervisor {
namespace {

bool is_printable(std::uint32_t character) {
  const auto within = [character](std::uint32_t low, std::uint32_t high) {
    return character >= low && character <= high;
  };
  return !within(0, 0x1f) && !within(0x7f, 0x9f) && !within(0x200e, 0x200f) && !within(0x2028, 0x202e) &&
         !within(0x2066, 0x2069);
}

Status refused(const std::string& what) {
  return invalid_argument("the reason " + what + "; allowed: 0.." + std::to_string(kMaxReasonBytes) +
                          " bytes of printable UTF-8, in one line");
}

}  // namespace

Status check_reason(const std::string& reason) {
  if (reason.size() > kMaxReasonBytes) return refused("has " + std::to_string(reason.size()) + " bytes");
  for (std::size_t at = 0; at < reason.size();) {
    const Utf8Character character = first_character(std::string_view(reason).substr(at));
    if (character.bytes == 0) return refused("is not UTF-8 at byte " + std::to_string(at));
    if (!is_printable(character.code_point)) {
      char name[16];
      std::snprintf(name, sizeof(name), "U+%04X", character.code_point);
      return refused("has the control character " + std::string(name) + " at byte " + std::to_string(at));
    }
    at += character.bytes;
  }
  return {};
}

}  // namespace epd::supervisor
