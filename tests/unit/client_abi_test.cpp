// What libepd.so is from outside: its exported symbols, what it links, its names for things.
#include "epd/epd.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string output_of(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  std::string text;
  std::array<char, 4096> buffer;
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
    text.append(buffer.data(), n);
  EXPECT_EQ(::pclose(pipe), 0) << command;
  return text;
}

// First groups of all matches.
std::set<std::string> matches(const std::string& text, const std::string& pattern) {
  std::set<std::string> found;
  const std::regex expression(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), expression), end; it != end; ++it)
    found.insert((*it)[1]);
  return found;
}

TEST(ClientAbi, LibraryMapAndHeaderNameTheSameFunctions) {
  const auto header = matches(read_file(EPD_HEADER), "EPD_API [^;(]*\\b(epd_[a-z_]+)\\(");
  const auto map = matches(read_file(EPD_MAP), "\\b(epd_[a-z_]+);");
  const auto exported =
      matches(output_of("nm -D --defined-only " EPD_LIBRARY), " T ([A-Za-z_0-9]+)@@EPD_0\\.1");
  EXPECT_EQ(header.size(), 20u) << "functions in the header";
  EXPECT_EQ(header, map);
  EXPECT_EQ(header, exported);
}

TEST(ClientAbi, NothingElseIsExported) {
  const std::string all = output_of("nm -D --defined-only " EPD_LIBRARY);
  std::istringstream lines(all);
  for (std::string line; std::getline(lines, line);) {
    const bool ours =
        line.find(" T epd_") != std::string::npos || line.find(" A EPD_0.1") != std::string::npos;
    EXPECT_TRUE(ours) << line;
  }
}

TEST(ClientAbi, LinksOnlyTheRuntime) {
  if (std::string(EPD_SANITIZERS) != "") GTEST_SKIP() << "sanitizer runtimes are linked in this build";
  const std::set<std::string> allowed = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6",
                                         "linux-vdso.so.1"};
  const auto linked =
      matches(output_of("ldd " EPD_LIBRARY), "\\n?\\s*([A-Za-z0-9_+.-]+\\.so[.0-9]*) (?:=>|\\(0x)");
  EXPECT_TRUE(linked.count("libc.so.6") == 1) << output_of("ldd " EPD_LIBRARY);
  for (const std::string& name : linked) {
    const bool loader = name.rfind("ld-linux", 0) == 0;  // a part of libc; gives thread-local storage
    EXPECT_TRUE(loader || allowed.count(name) == 1) << name;
  }
  const auto soname = matches(output_of("readelf -d " EPD_LIBRARY), "SONAME\\).*\\[(.*)\\]");
  EXPECT_EQ(soname, std::set<std::string>{"libepd.so.0"});
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
  epd_session_detach(nullptr);
  epd_group_leave(nullptr);
}

}  // namespace
