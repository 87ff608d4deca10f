// A daemon of two devices with a bystander on both, and what must hold after any attack: the bystander was
// served, exactly; no engine was restarted; everything that the attackers had is gone.
#pragma once

#include "bystander.h"
#include "hostile.h"

#include <gtest/gtest.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

// Users that need not exist. The fixture's policy lets kMallory attach, and root; nobody else.
inline constexpr std::uint32_t kMallory = 61001;
inline constexpr std::uint32_t kStranger = 61002;

class Hostile : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // Each attacker is a process. A test failure unless all return within `seconds`.
  void attack(const std::vector<std::function<void()>>& attackers, double seconds = 60);
  void attack(const std::function<void()>& attacker) { attack(std::vector{attacker}); }
  // Becomes another user for good; throws if it cannot.
  static void become(std::uint32_t user);
  static bool root();

  void expect_logged(const std::string& text) const;
  // A number of `epctl --json COMMAND`: the first one after "key":.
  std::uint64_t shown(const std::string& call, const std::string& key) const;
  const std::string& socket() const { return daemon_->socket(); }
  const Daemon& daemon() const { return *daemon_; }

 private:
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<Bystander> bystander_;
  std::vector<pid_t> engines_;
  std::size_t held_ = 0;  // descriptors and mappings of memory, in the supervisor and the engines
};

// Throws RankFailure unless `text` holds each of the words.
void must_hold(const std::string& text, const std::vector<std::string>& words);

}  // namespace epd::test
