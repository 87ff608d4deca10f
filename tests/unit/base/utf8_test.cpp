// UTF-8: every code point is read back, and every other form is refused.
#include "base/utf8.h"

#include <gtest/gtest.h>
#include <string>

namespace epd {
namespace {

std::string encode(std::uint32_t code_point, std::size_t bytes) {
  if (bytes == 1) return {static_cast<char>(code_point)};
  std::string text(bytes, '\0');
  for (std::size_t i = bytes - 1; i > 0; --i, code_point >>= 6)
    text[i] = static_cast<char>(0x80 | (code_point & 0x3f));
  text[0] = static_cast<char>(0xf00u >> bytes | code_point);
  return text;
}
std::size_t bytes_of(std::uint32_t code_point) {
  return code_point < 0x80 ? 1 : code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
}

TEST(Utf8, EveryCodePointIsReadAndItsOtherFormsAreRefused) {
  for (std::uint32_t code_point = 0; code_point < 0x110000; ++code_point) {
    const std::size_t bytes = bytes_of(code_point);
    const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
    const std::string text = encode(code_point, bytes);
    const Utf8Character read = first_character(text + "x");
    ASSERT_EQ(read.bytes, surrogate ? 0 : bytes) << std::hex << code_point;
    ASSERT_EQ(read.code_point, surrogate ? 0 : code_point);
    for (std::size_t longer = bytes + 1; longer <= 4; ++longer)
      ASSERT_EQ(first_character(encode(code_point, longer)).bytes, 0u) << std::hex << code_point;
    for (std::size_t cut = 0; cut < bytes; ++cut)
      ASSERT_EQ(first_character(text.substr(0, cut)).bytes, 0u) << std::hex << code_point;
  }
}

TEST(Utf8, WhatIsNoCharacterIsRefused) {
  EXPECT_EQ(first_character(encode(0x110000, 4)).bytes, 0u);
  for (int lead = 0x80; lead < 0x100; ++lead) {
    const std::string alone(1, static_cast<char>(lead));
    EXPECT_EQ(first_character(alone + "xxx").bytes, 0u) << lead;
    if (lead < 0xc2 || lead > 0xf4) {
      EXPECT_EQ(first_character(alone + "\x80\x80\x80").bytes, 0u) << lead;
    }
  }
}

}  // namespace
}  // namespace epd
