// Daemons of one cluster on this machine, with certificates of a CA of their own, at free ports of 127.0.0.1.
#pragma once

#include "support/cases.h"
#include "support/daemon.h"

#include <gtest/gtest.h>
#include <sys/types.h>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

using Json = nlohmann::json;
using Settings = std::vector<std::pair<std::string, std::string>>;

double now_seconds();
// Until `condition`, for so long at most. The seconds that it took, or -1.
double until(double seconds, const std::function<bool()>& condition);

class DaemonCluster {
 public:
  // `devices`: of each daemon.
  explicit DaemonCluster(std::uint32_t devices = 1) : devices_(devices) {}
  ~DaemonCluster();
  DaemonCluster(const DaemonCluster&) = delete;
  DaemonCluster& operator=(const DaemonCluster&) = delete;

  // Generous, where a test does not mean the time itself.
  static constexpr double kSoon = 20;

  // Before prepare(): that node is elsewhere. `enter` takes a process there.
  void place(const std::string& letter, const std::string& host, std::function<void()> enter);
  // The directory and the certificates. A test failure (and false) if that can't be.
  bool prepare();
  // deploy/test-ca.sh; a test failure if it fails.
  static void make_certificates(const std::string& directory, const std::vector<std::string>& nodes,
                                int days = 90);
  // "a" is node-a, which coordinates. Each has a port and settings; `more` replaces or adds some (in TOML).
  Settings settings_of(const std::string& letter, const Settings& more = {});
  Daemon& add(const std::string& letter, const Settings& more = {});
  Daemon& start(const std::string& letter, const Settings& more = {});
  Daemon& at(const std::string& letter) { return *daemons_.at(letter); }
  std::uint16_t port(const std::string& letter);
  std::string address(const std::string& letter) { return host(letter) + ":" + std::to_string(port(letter)); }

  // The answers of epctl there.
  static Json nodes(const Daemon& daemon);
  static Json status(const Daemon& daemon);
  // The row of a node, as that daemon sees it; null: none.
  Json node(const std::string& seen_by, const std::string& letter);
  std::string state(const std::string& seen_by, const std::string& letter);
  // Waits; a test failure with the table if it does not come to that. The seconds that it took.
  double await(const std::string& seen_by, const std::string& letter, const std::string& state,
               double seconds = kSoon);
  std::uint64_t refused(const std::string& by, const std::string& reason);
  void await_refusal(const std::string& by, const std::string& reason, std::uint64_t at_least = 1);

  // A small group that spans nodes. Each rank is a sum domain.
  static Case spanning_case(std::uint32_t num_ranks = 2);

  const std::string& directory() const { return directory_; }

 private:
  struct Place {
    std::string host = "127.0.0.1";
    std::function<void()> enter{};
  };
  std::string host(const std::string& letter) { return places_[letter].host; }

  const std::uint32_t devices_;
  std::string directory_;  // of ca.pem, node-a.pem, node-a.key, ...
  std::map<std::string, Place> places_;
  std::map<std::string, std::uint16_t> ports_;
  std::map<std::string, std::unique_ptr<Daemon>> daemons_;
};

// A test with one.
class ClusterOfDaemons : public testing::Test, protected DaemonCluster {
 protected:
  void SetUp() override { ASSERT_TRUE(prepare()); }
};

}  // namespace epd::test
