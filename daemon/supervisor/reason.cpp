#include "reason.h"

#include <cstdint>
#include <cstdio>

namespace epd {
namespace {

constexpr std::uint32_t kNoCharacter = ~std::uint32_t{0};

// Of the character that begins at `at`, which is moved past it; kNoCharacter if none does.
std::uint32_t next_character(const std::string& text, std::size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at++]);
  if (lead < 0x80) return lead;
  const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
  if (lead < 0xc2 || lead > 0xf4) return kNoCharacter;
  std::uint32_t character = lead & (0x3f >> more);
  for (int i = 0; i < more; ++i) {
    if (at == text.size() || (text[at] & 0xc0) != 0x80) return kNoCharacter;
    character = character << 6 | (text[at++] & 0x3f);
  }
  return character;
}

bool is_printable(std::uint32_t character) {
  const auto within = [character](std::uint32_t low, std::uint32_t high) {
    return character >= low && character <= high;
  };
  return !within(0, 0x1f) && !within(0x7f, 0x9f) && !within(0x200e, 0x200f) && !within(0x2028, 0x202e) &&
         !within(0x2066, 0x2069) && !within(0xd800, 0xdfff) && character <= 0x10ffff;
}

Status refused(const std::string& what) {
  return invalid_argument("the reason " + what + "; allowed: 0.." + std::to_string(kMaxReasonBytes) +
                          " bytes of printable UTF-8, in one line");
}

}  // namespace

Status check_reason(const std::string& reason) {
  if (reason.size() > kMaxReasonBytes) return refused("has " + std::to_string(reason.size()) + " bytes");
  for (std::size_t at = 0; at < reason.size();) {
    const std::size_t begin = at;
    const std::uint32_t character = next_character(reason, at);
    if (character == kNoCharacter) return refused("is not UTF-8 at byte " + std::to_string(begin));
    if (is_printable(character)) continue;
    char name[16];
    std::snprintf(name, sizeof(name), "U+%04X", character);
    return refused("has the control character " + std::string(name) + " at byte " + std::to_string(begin));
  }
  return {};
}

}  // namespace epd
