// The common parts of gpu_fault_test's cases: a daemon on GPUs, one of which fails, and four ranks. The
// victim has that GPU for itself; the others are on the rest, with four GPUs each on its own, with two all
// three on one.
#pragma once

#include "gpu_fault.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

inline constexpr std::uint32_t kFaultRanks = 4;
inline constexpr std::uint32_t kVictim = 2;

// Seconds; 0: not yet.
struct RankTimes {
  std::atomic<double> told{0};   // an operation ended with a status that says why
  std::atomic<double> again{0};  // the first that succeeded after that
  std::atomic<double> whole{0};  // the first of all ranks, the victim's successor included
};

struct Stage {
  Gate ready;     // ranks that are where they shall be when the victim dies
  Gate degraded;  // survivors that have gone on without it
  Gate attached;  // the successor has
  Gate joined;
  Gate finished;
  Gate seen;
  RankTimes times[kFaultRanks];
};

void set_first(std::atomic<double>& time);
void print_times(const std::string& what, double killed, const Stage& stage);

class GpuFault : public testing::Test {
 protected:
  void SetUp() override { start({}); }
  void start(const std::vector<std::pair<std::string, std::string>>& settings, std::uint32_t least_gpus = 2);
  void TearDown() override { gpus_.reset(); }
  Daemon& daemon() const { return gpus_->daemon(); }
  // Where the rank is: a GPU's number, and its device.
  std::uint32_t gpu_of(std::uint32_t rank) const;
  std::uint32_t victims_gpu() const { return gpu_of(kVictim); }
  // Occupies the GPU by a kernel of the victim's process, which calls this.
  void occupy_its_gpu(int seconds = 600) const;
  std::string device_of(std::uint32_t rank) const { return daemon().device(gpu_of(rank)); }

  // A successor for the victim: tried again by new processes while MPS takes nobody.
  RankProcess successor(Stage& stage, const std::function<std::string(const Session&)>& body) const;
  // All ranks but the victim, whose place the newcomer has taken.
  void expect_all_end_well(std::vector<RankProcess>& ranks, RankProcess& newcomer) const;

  std::unique_ptr<FaultyGpus> gpus_;
};

// One GPU suffices for these.
class OneGpuFault : public GpuFault {
 protected:
  void SetUp() override { start({}, 1); }
};

Case gpu_case(bool degrade);

// Memory of a group of its own, with a pattern that must still be there in the end.
class Keepsake {
 public:
  Keepsake(const Session& session, std::uint32_t rank);
  void check() const;

 private:
  const Group group_;
  std::vector<std::byte> pattern_;
};

// Status names -> how often.
void only_these(const std::map<std::string, std::uint64_t>& failures, const std::set<std::string>& allowed);

}  // namespace epd::test
