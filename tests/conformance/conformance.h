// The fixture of the conformance suite: one daemon per device prefix, and ranks on all of its devices.
#pragma once

#include "support/cases.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"
#include "support/script.h"

#include <gtest/gtest.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {

// Base of all random seeds; EPD_TEST_SEED=N repeats or varies a run.
std::uint64_t base_seed();

class Conformance : public testing::TestWithParam<std::string> {
 public:
  static void TearDownTestSuite();

 protected:
  using Body = std::function<void(const Session&, const Group&, std::uint32_t rank)>;

  void SetUp() override;
  // Of the devices, as use_devices() has it. A suite may have other parameters.
  virtual std::string device_kind() const { return in_streams() ? "resident" : GetParam(); }
  // "resident_in_streams": all operations of with_ranks() and of scripts are enqueued in streams.
  static bool in_streams() { return GetParam() == "resident_in_streams"; }
  // All ranks of a case attach, join and run the body.
  void with_ranks(const Case& c, const Body& body, double seconds = 90);
  // All ranks of a case run a script.
  void run_script(const Case& c, const ScriptOptions& options, double seconds = 120);
  // The same for many cases of as many ranks, one after the other in the same sessions.
  struct Script {
    Case test_case;
    ScriptOptions options;
  };
  void run_scripts(const std::vector<Script>& scripts, double seconds = 120);
  std::string group_name() const;

  static Daemon& daemon() { return *daemon_; }

 private:
  static std::unique_ptr<Daemon> daemon_;
  static std::string prefix_;  // of its devices
};

constexpr int kWaitMs = 30000;

// Fills a slot with the case's round and submits a dispatch.
epd_ticket_t submit_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot,
                             Round round, epd_handle_t* handle = nullptr, std::uint32_t timeout_ms = 20000);
epd_ticket_t submit_combine(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot,
                            Round round, epd_handle_t handle, std::uint32_t timeout_ms = 20000);
// Waits and checks against the specification.
void finish_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot, Round round,
                     epd_ticket_t ticket);
void finish_combine(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot, Round round,
                    epd_ticket_t ticket);
// A dispatch and a combine, checked.
void one_round(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t round);

}  // namespace epd::test
