// UTF-8, as RFC 3629 defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace epd {

struct Utf8Character {
  std::uint32_t code_point = 0;
  std::size_t bytes = 0;  // 0: the text does not begin with a well-formed character
};

// Reads the first character of `text`. Refuses overlong forms, surrogates, and code points above 10FFFF.
constexpr Utf8Character first_character(std::string_view text) {
  if (text.empty()) return {};
  const auto byte = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xc2 || lead > 0xf4) return {};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (text.size() < bytes) return {};
  std::uint32_t code_point = lead & (0x7fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code_point = code_point << 6 | (byte(i) & 0x3f);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
  if (code_point < kLeast[bytes] || surrogate || code_point > 0x10ffff) return {};
  return {code_point, bytes};
}

// Every byte that does not belong to UTF-8 becomes U+FFFD.
inline std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = first_character(text).bytes;
    if (length == 0) {
      clean += "\xef\xbf\xbd";
    } else {
      clean += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return clean;
}

}  // namespace epd
