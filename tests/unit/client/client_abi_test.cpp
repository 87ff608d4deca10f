// libepd.so seen from outside: its exported symbols, what it links, its names for things.
#include "epd/epd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string output_of(const std::string& call) {
  FILE* pipe = ::popen(call.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  std::string text;
  std::array<char, 4096> buffer;
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
    text.append(buffer.data(), n);
  EXPECT_EQ(::pclose(pipe), 0) << call;
  return text;
}

// The words epd_... that are followed by `mark`.
std::set<std::string> names_before(const std::string& text, const std::string& mark) {
  std::set<std::string> found;
  for (std::size_t at = text.find("epd_"); at != std::string::npos; at = text.find("epd_", at + 1)) {
    const std::size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", at);
    if (end != std::string::npos && text.compare(end, mark.size(), mark) == 0) {
      found.insert(text.substr(at, end - at));
    }
  }
  return found;
}

// The word at `index` (0, 1, ...) of each line that contains `piece`.
std::vector<std::string> words_of_lines(const std::string& text, const std::string& piece, int index) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(piece) == std::string::npos) continue;
    std::istringstream words(line);
    std::string word;
    for (int i = 0; i <= index; ++i) words >> word;
    found.push_back(word);
  }
  return found;
}

TEST(ClientAbi, LibraryMapAndHeaderNameTheSameFunctions) {
  auto header = names_before(read_file(EPD_HEADER), "(");
  std::erase_if(header, [](const std::string& name) {  // inline
    return name.ends_with("_init") || name == "epd_is_break";
  });
  const auto map = names_before(read_file(EPD_MAP), ";");
  const auto exported = names_before(output_of("nm -D --defined-only " EPD_LIBRARY), "@@EPD_0.1");
  EXPECT_EQ(header.size(), 36u) << "functions in the header";
  EXPECT_EQ(header, map);
  EXPECT_EQ(header, exported);
}

TEST(ClientAbi, NothingElseIsExported) {
  for (const std::string& name : words_of_lines(output_of("nm -D --defined-only " EPD_LIBRARY), "", 2)) {
    EXPECT_TRUE(name.rfind("epd_", 0) == 0 || name == "EPD_0.1") << name;
  }
}

TEST(ClientAbi, LinksOnlyTheRuntime) {
  if (!std::string(EPD_SANITIZERS).empty()) GTEST_SKIP() << "sanitizer runtimes are linked in this build";
  const std::vector<std::string> linked = words_of_lines(output_of("ldd " EPD_LIBRARY), "(0x", 0);
  const std::set<std::string> allowed = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6",
                                         "linux-vdso.so.1"};
  EXPECT_EQ(std::count(linked.begin(), linked.end(), "libc.so.6"), 1);
  for (const std::string& path : linked) {
    const std::string name = path.substr(path.rfind('/') + 1);
    const bool loader = name.rfind("ld-linux", 0) == 0;  // a part of libc; gives thread-local storage
    EXPECT_TRUE(loader || allowed.count(name) == 1) << name;
  }
  const auto soname = words_of_lines(output_of("readelf -d " EPD_LIBRARY), "SONAME", 4);
  EXPECT_EQ(soname, std::vector<std::string>{"[libepd.so.1]"});
}

TEST(ClientAbi, NamesAndVersion) {
  EXPECT_STREQ(epd_version(), EPD_VERSION_TEXT);
  const std::string header = std::to_string(EPD_VERSION_MAJOR) + "." + std::to_string(EPD_VERSION_MINOR) +
                             "." + std::to_string(EPD_VERSION_PATCH);
  EXPECT_EQ(header, epd_version());
  EXPECT_STREQ(epd_status_name(EPD_OK), "OK");
  EXPECT_STREQ(epd_status_name(EPD_RANK_LOST), "RANK_LOST");
  EXPECT_STREQ(epd_status_name(EPD_INTERNAL), "INTERNAL");
  EXPECT_EQ(epd_group_rank(nullptr), UINT32_MAX);
  EXPECT_EQ(epd_group_sum_ranks(nullptr), 0u);
  EXPECT_EQ(epd_session_detach(nullptr), EPD_OK);
  EXPECT_EQ(epd_group_leave(nullptr), EPD_OK);
}

template <typename Struct>
void expect_initialised(void (*init)(Struct*)) {
  Struct made;
  std::memset(static_cast<void*>(&made), 0xa5, sizeof(made));
  init(&made);
  EXPECT_EQ(made.size, sizeof(Struct));
  made.size = 0;
  const Struct zero{};
  EXPECT_EQ(std::memcmp(&made, &zero, sizeof(made)), 0);
}

TEST(ClientAbi, InitSetsTheSizeAndZeroEverywhereElse) {
  expect_initialised(&epd_attach_options_init);
  expect_initialised(&epd_session_info_init);
  expect_initialised(&epd_group_config_init);
  expect_initialised(&epd_group_bytes_init);
  expect_initialised(&epd_buffers_init);
  expect_initialised(&epd_resume_info_init);
  expect_initialised(&epd_progress_init);
  expect_initialised(&epd_memory_init);
  expect_initialised(&epd_dispatch_args_init);
  expect_initialised(&epd_combine_args_init);
  expect_initialised(&epd_result_init);
  expect_initialised(&epd_counts_init);
  auto functions = names_before(read_file(EPD_HEADER), "(");
  std::erase_if(functions, [](const std::string& name) { return !name.ends_with("_init"); });
  EXPECT_EQ(functions.size(), 12u) << "those above";
}

}  // namespace
