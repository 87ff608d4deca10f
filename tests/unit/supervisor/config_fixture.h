// A configuration file of its own for each test.
#pragma once

#include "supervisor/config.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <filesystem>
#include <fstream>
#include <string>

namespace epd::supervisor {

class ConfigFile : public testing::Test {
 protected:
  ConfigFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-config-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    sources_.path = directory_ + "/epd.toml";
    sources_.path_given = true;
  }
  ~ConfigFile() override { std::filesystem::remove_all(directory_); }

  void write(const std::string& text) const { std::ofstream(sources_.path) << text; }
  Result<Config> load(const std::string& text) const {
    write(text);
    return load_config(sources_);
  }
  std::string refusal(const std::string& text) const {
    const Result<Config> config = load(text);
    EXPECT_FALSE(config.ok()) << text;
    return config.status().to_string();
  }
  static std::string origin(const Config& config, const std::string& key) {
    for (const ConfigEntry& entry : config.entries) {
      if (entry.key == key) return entry.origin;
    }
    return "missing";
  }

  std::string directory_;
  ConfigSources sources_;
};

}  // namespace epd::supervisor
