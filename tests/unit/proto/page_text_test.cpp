// A text of a page is read whole, or as "".
#include "proto/far_statistics.h"

#include <gtest/gtest.h>
#include <atomic>
#include <memory>
#include <thread>

namespace epd::abi {
namespace {

TEST(PageText, KeepsWhatHasRoom) {
  const auto text = std::make_unique<PageText<16>>();
  EXPECT_EQ(text->load(), "");
  text->store("node-b");
  EXPECT_EQ(text->load(), "node-b");
  text->store("0123456789abcdefgh");
  EXPECT_EQ(text->load(), "0123456789abcde");
  text->store("a");
  EXPECT_EQ(text->load(), "a");
  text->clear();
  EXPECT_EQ(text->load(), "");
}

TEST(PageText, ReadersSeeNoMixture) {
  const auto text = std::make_unique<PageText<128>>();
  const std::string words[] = {std::string(127, 'a'), std::string(90, 'b')};
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::size_t i = 0; !stop; ++i) text->store(words[i % 2]);
  });
  for (int i = 0; i < 20'000; ++i) {
    const std::string seen = text->load();
    EXPECT_TRUE(seen.empty() || seen == words[0] || seen == words[1]) << seen;
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace epd::abi
