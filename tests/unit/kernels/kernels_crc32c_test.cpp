#include "kernels/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace epd::kernels {
namespace {

TEST(Crc32c, ItIsThatOfRfc3720) {
  const auto of = [](std::string_view text) { return crc32c(std::as_bytes(std::span(text))); };
  EXPECT_EQ(of(""), 0u);
  EXPECT_EQ(of("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32)), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);
}

TEST(Crc32c, AllWaysAgree) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(20'000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const std::vector<Crc32cWay> ways = crc32c_ways();
  for (int i = 0; i < 500; ++i) {
    const std::byte* const data = bytes.data() + random() % 64;
    const std::size_t size = random() % 10'000;
    const std::size_t cut = random() % (size + 1);
    const auto before = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = ways[0](before, data, size);
    for (std::size_t way = 1; way < ways.size(); ++way) {
      ASSERT_EQ(ways[way](before, data, size), expected) << "way " << way << ", " << size << " bytes";
      ASSERT_EQ(ways[way](ways[way](before, data, cut), data + cut, size - cut), expected) << "way " << way;
    }
  }
}

}  // namespace
}  // namespace epd::kernels
