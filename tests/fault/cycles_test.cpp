// A thousand clients that attach, join, submit and are killed leave nothing behind in any process.
#include "common/signal.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <array>
#include <memory>

namespace epd::test {
namespace {

constexpr int kCycles = 1000;
constexpr int kWarmUp = 1100;  // allocators, caches of threads, page tables; the event log is full
constexpr int kAtOnce = 4;
// Resident memory of a process may grow by this in between: a leak of two pages per cycle would be 8 MiB.
constexpr std::uint64_t kBandKib = 1024;

enum class Last { kAttached, kJoined, kSubmitted, kCompleted, kInAPair };
constexpr int kLasts = 5;

// Lives until just after `last` and dies by its own hand: kill -9 cannot tell.
std::string live_and_die(const Daemon& daemon, const Case& c, int cycle, std::uint32_t rank, Last last) {
  const auto device = static_cast<std::uint32_t>(cycle) + rank;
  const Session session(daemon.socket(), daemon.device(device));
  if (last != Last::kAttached) {
    const Group group(session, c.config(("cycle-" + std::to_string(cycle)).c_str(), rank));
    if (last != Last::kJoined) {
      const Input input = make_input(c, rank, 0);
      fill_dispatch(c, group.buffers(0), input);
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      args.num_tokens = input.num_tokens;
      epd_ticket_t ticket = 0;
      const epd_status_t status = group.dispatch(&args, &ticket, nullptr);
      if (last != Last::kInAPair) must(status, "dispatch");  // the other one may be dead already
      if (last == Last::kCompleted) must(group.wait(ticket, 20000), "dispatch");
    }
    send_signal(::getpid(), SIGKILL);  // before the group is left
  }
  send_signal(::getpid(), SIGKILL);
  return "";
}

class Cycles : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = {{"log.level", "\"warning\""}};
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }

  void run(int first, int last) {
    for (int next = first; next < last && !HasFailure();) {
      std::vector<RankProcess> batch;
      for (int i = 0; i < kAtOnce && next < last; ++i, ++next) {
        const auto kind = static_cast<Last>(next % kLasts);
        const std::uint32_t ranks = kind == Last::kInAPair ? 2 : 1;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          batch.emplace_back([this, next, rank, ranks, kind] {
            return live_and_die(*daemon_, fault_case(ranks, 2), next, rank, kind);
          });
        }
      }
      for (RankProcess& process : batch) {
        const RankOutcome outcome = process.wait(30);
        // In a pair the one may hear of the other's death instead of joining.
        if (outcome.signal != SIGKILL && outcome.text.find("RANK_LOST") == std::string::npos) {
          ADD_FAILURE() << "cycle " << next << ": " << outcome.to_string();
        }
      }
    }
  }

  std::unique_ptr<Daemon> daemon_;
};

TEST_F(Cycles, AThousandAttachSubmitAndKill) {
  run(0, kWarmUp);
  const SystemCensus before = settled_census(*daemon_);
  const double start = now_s();
  run(kWarmUp, kWarmUp + kCycles);
  const double seconds = now_s() - start;
  expect_same_census(*daemon_, before);
  const SystemCensus after = settled_census(*daemon_);
  std::printf("%d cycles in %.1f s\nbefore:\n%safter:\n%s", kCycles, seconds, before.to_string().c_str(),
              after.to_string().c_str());
  for (std::size_t i = 0; kMemoryIsOurs && i < before.processes.size(); ++i) {
    EXPECT_LE(after.processes[i].own_kib, before.processes[i].own_kib + kBandKib) << "process " << i;
    EXPECT_LE(after.processes[i].shared_kib, before.processes[i].shared_kib + kBandKib) << "process " << i;
    EXPECT_LE(after.processes[i].mappings, before.processes[i].mappings + 4) << "process " << i;
  }
  expect_serves(*daemon_, 2, "after");
}

}  // namespace
}  // namespace epd::test
