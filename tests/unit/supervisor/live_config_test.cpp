// The configuration in force: what files say, what an operator has set, and what a reload makes of both.
#include "live_config.h"

#include "config_fixture.h"

#include <gtest/gtest.h>
#include <utility>

namespace epd::supervisor {
namespace {

class LiveConfigTest : public ConfigFile {
 protected:
  LiveConfig start(const std::string& text) const {
    Result<Config> config = load(text);
    EXPECT_TRUE(config.ok()) << config.status().to_string();
    return {std::move(config).value(), sources_};
  }
};

TEST_F(LiveConfigTest, WhatIsSetStaysUntilTheFileSaysSomethingNewAboutIt) {
  LiveConfig config = start("limits.max_sessions = 7\nlimits.max_groups = 7\n");
  ASSERT_TRUE(config.set({{"limits.max_sessions", "9"}, {"limits.max_groups", "9"}}).ok());
  write("limits.max_sessions = 7\nlimits.max_groups = 8\n");
  const auto changes = config.reload();
  ASSERT_TRUE(changes.ok()) << changes.status().to_string();
  EXPECT_EQ(config->max_sessions, 9u);
  EXPECT_EQ(config->max_groups, 8u);
  ASSERT_EQ(changes.value().size(), 1u) << "only what is in force differs";
  EXPECT_EQ(changes.value()[0].key, "limits.max_groups");
  EXPECT_EQ(changes.value()[0].before, "9");
  EXPECT_EQ(config.session_limits().max_sessions, 9u);
}

TEST_F(LiveConfigTest, UnsetIsWhatTheFileSays) {
  LiveConfig config = start("limits.max_sessions = 7\n");
  ASSERT_TRUE(config.set({{"limits.max_sessions", "9"}, {"log.level", "debug"}}).ok());
  const auto changes = config.set({{"limits.max_sessions", std::nullopt}});
  ASSERT_TRUE(changes.ok());
  EXPECT_EQ(config->max_sessions, 7u);
  EXPECT_EQ(config->log_level, "debug");
  EXPECT_EQ(changes.value().at(0).after, "7");
  EXPECT_TRUE(config.set({{"limits.max_groups", std::nullopt}}).value().empty()) << "nothing was set";
  for (const char* key : {"devices.sms", "limits.nothing"})
    EXPECT_EQ(config.set({{key, std::nullopt}}).status().code(), StatusCode::kInvalidArgument) << key;
}

TEST_F(LiveConfigTest, ARefusalChangesNothing) {
  LiveConfig config = start("limits.max_sessions = 7\n");
  EXPECT_FALSE(config.set({{"limits.max_groups", "3"}, {"limits.max_sessions", "0"}}).ok());
  EXPECT_EQ(config->max_groups, 256u);
  ASSERT_TRUE(config.set({{"limits.max_groups", "3"}}).ok());
  write("limits.max_sessions = 8\ndaemon.socket = \"/elsewhere\"\n");
  const auto refused = config.reload();
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("daemon.socket changed"), std::string::npos)
      << refused.status().message();
  EXPECT_EQ(config.last_error(), refused.status().message());
  EXPECT_EQ(config->max_sessions, 7u);
  EXPECT_EQ(config->max_groups, 3u);
  EXPECT_EQ(config.generation(), 1u);
}

}  // namespace
}  // namespace epd::supervisor
