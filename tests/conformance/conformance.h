// The fixture of the conformance suite: one daemon per device prefix, and ranks on all of its devices.
#pragma once

#include "kit/nodes.h"
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/daemon_cluster.h"
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

// The devices that this program's suites run on: those of one node ("host", "cuda", "cuda_in_streams"), also
// those for true GPUs where there are some; or the `spanning` ones. The fake driver computes with the code of
// host devices: it shows order, words, journals and failures, for which few kinds and cases suffice.
struct Kinds {
  std::vector<std::string> of_one_node;
  std::vector<std::string> on_true_gpus;
  std::vector<std::string> spanning = {"nodes3"};
};
std::vector<std::string> kinds_here(const Kinds& kinds);

class Conformance : public testing::TestWithParam<std::string> {
 public:
  static void TearDownTestSuite();

 protected:
  using Body = std::function<void(const Session&, const Group&, std::uint32_t rank)>;

  void SetUp() override;
  // The kind of the devices, as use_devices() has it. A suite may have other parameters.
  virtual std::string device_kind() const { return in_streams() ? "cuda" : GetParam(); }
  // "cuda_in_streams": all operations of with_ranks() and of scripts are enqueued in streams.
  bool spans() const { return device_kind().starts_with("nodes"); }
  bool on_host() const { return device_kind() == "host" || spans(); }
  static bool in_streams() { return GetParam() == "cuda_in_streams"; }
  // The number of cases, out of `all`, that run on devices of this kind: on GPUs of the fake driver a tenth.
  std::uint32_t cases_here(std::uint32_t all) const;
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

  static Daemon& daemon() { return daemon_of(0); }
  // In groups that span nodes each rank is on another node than the one before.
  static Daemon& daemon_of(std::uint32_t rank);
  static Session session_of(std::uint32_t rank, epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP) {
    return Session(daemon_of(rank).socket(), daemon_of(rank).device(rank), wait_by);
  }
  static pid_t engine_of(std::uint32_t rank) {
    return daemon_of(rank).engine(rank % daemon_of(rank).devices());
  }

 private:
  static bool start_nodes(std::uint32_t nodes);

  static std::unique_ptr<Daemon> daemon_;
  static std::unique_ptr<kit::NodeNetwork> network_;  // the cluster's
  static std::unique_ptr<DaemonCluster> cluster_;
  static std::uint32_t nodes_;  // of the cluster
  static std::string prefix_;   // of its devices
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
