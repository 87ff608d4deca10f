// A daemon with two devices, and epctl's documents.
#pragma once

#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

using nlohmann::json;

class Operator : public testing::Test {
 protected:
  void start(std::vector<std::pair<std::string, std::string>> settings = {}) {
    DaemonOptions options;
    options.devices = 2;
    options.settings = std::move(settings);
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  // epctl --json ...; a test failure and null if it fails or prints no JSON.
  json epctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--json");
    const CommandResult result = daemon_->epctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << arguments.at(1) << ": " << result.out << result.err;
    json parsed = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << result.out;
    return parsed;
  }
  // One document per line.
  std::vector<json> lines(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--json");
    std::istringstream out(daemon_->epctl(arguments).out);
    std::vector<json> documents;
    for (std::string line; std::getline(out, line);) documents.push_back(json::parse(line, nullptr, false));
    return documents;
  }
  // The answer of epctl op for the only operation in flight; null if there is none.
  json the_operation() {
    const json operations = epctl({"ops"})["operations"];
    if (operations.size() != 1) return nullptr;
    const CommandResult result = daemon_->epctl({"--json", "op", operations[0]["id"]});
    return result.exit_code == 0 ? json::parse(result.out, nullptr, false) : json(nullptr);
  }
  std::set<std::string> event_kinds() {
    std::set<std::string> kinds;
    for (const json& event : lines({"events"})) kinds.insert(event["kind"]);
    return kinds;
  }

  std::unique_ptr<Daemon> daemon_;
};

struct Stage {
  Gate joined;
  Gate go;
  Gate stop;
  std::atomic<std::uint64_t> operations{0};
};

}  // namespace epd::test
