// Groups whose operations are calls: each rank's stream replays a graph. A rank dies in one of several
// ways; the others are told, resume, and replay the same graph.
#include "gpu_fault_fixture.h"
#include "support/replayed.h"

#include <signal.h>
#include <ostream>

namespace epd::test {
namespace {

enum class Death {
  kBetweenOperations,  // hurts nobody else
  kInItsKernel,        // of its own: takes along its engine
  kWaitingByKernel,    // in its stream, for a call whose peers wait too: likewise
  kWaitingByMemop,     // hurts nobody else
  kWithItsEngine,      // which is killed
};

struct Fate {
  const char* name;
  Death death;
  bool degrade;
  bool fails_gpu() const { return death != Death::kBetweenOperations && death != Death::kWaitingByMemop; }
  // One rank comes only when it hears of the death, so that the victim is waiting for it.
  bool in_a_call() const { return death >= Death::kWaitingByKernel; }
  std::uint32_t kernel_waits() const { return death == Death::kWaitingByMemop ? 0 : ~0u; }
};

// In the names of tests; else they would have addresses.
void PrintTo(const Fate& fate, std::ostream* out) {
  *out << fate.name;
}

constexpr std::uint32_t kLatecomer = 0;
// Numbers of the group's operations; a replay is two.
constexpr std::uint64_t kLoss = 60;     // the victim dies at the first replay from here on
constexpr std::uint64_t kRejoin = 160;  // its successor must be in
constexpr std::uint64_t kEnd = 200;
constexpr int kResumeMs = 20000;

struct PlayOptions {
  std::uint64_t end_op = kEnd;
  epd_status_t end = EPD_OK;  // the group may end with this
  Gate* finished = nullptr;   // ranks that are done: a break may call them back until all are
  std::function<void(std::uint64_t)> before = {};  // each replay
  std::function<void()> on_success = {};
  std::function<void()> on_failure = {};
};

// One rank's replays. The data of each follow from the number of its first operation, on which all agree
// also after a break.
class Player {
 public:
  Player(const Group& group, const Case& c, std::uint32_t rank, PlayOptions options)
      : group_(group), options_(std::move(options)), replayed_(group, c, rank), num_ranks_(c.num_ranks) {}

  // How many operations ended with what.
  std::map<std::string, std::uint64_t> run() {
    if (!resume()) return failures_;
    do {
      while (next_ < options_.end_op) {
        if (!play()) return failures_;
      }
    } while (is_called_back());
    return failures_;
  }

 private:
  // False: the group has ended, as it may.
  bool play() {
    if (options_.before) options_.before(next_);
    note("operation " + std::to_string(next_));
    replayed_.play(next_);
    const epd_status_t status = epd_group_check(group_.get(), nullptr);
    if (status != EPD_OK) return recover(status);
    replayed_.check(next_, lost_);
    next_ += 2;
    if (options_.on_success) options_.on_success();
    return true;
  }

  bool recover(epd_status_t status) {
    note(std::string("resume after ") + epd_status_name(status));
    ++failures_[epd_status_name(status)];
    if (options_.on_failure) options_.on_failure();
    return status != options_.end && resume();
  }

  bool resume() {
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    const epd_status_t status = epd_group_resume(group_.get(), kResumeMs, &info);
    if (status != EPD_OK && status == options_.end) return false;
    must(status, "resume");
    next_ = info.resume_op;
    lost_.clear();
    for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
      if (epd_group_active(group_.get(), rank) == 0) lost_.insert(rank);
    }
    return true;
  }

  bool is_called_back() {
    if (options_.finished == nullptr) return false;
    options_.finished->arrive();
    for (const double end = now_s() + 60; options_.finished->count < num_ranks_; sleep_ms(2)) {
      RANK_CHECK(now_s() < end, "the other ranks have not finished in 60 s");
      const epd_status_t status = epd_group_check(group_.get(), nullptr);
      if (options_.finished->count >= num_ranks_) break;  // others may have left by now
      if (status == EPD_OK) continue;
      options_.finished->count.fetch_sub(1);
      return recover(status);
    }
    return false;
  }

  const Group& group_;
  const PlayOptions options_;
  Replayed replayed_;
  const std::uint32_t num_ranks_;
  std::uint64_t next_ = 0;
  std::set<std::uint32_t> lost_;
  std::map<std::string, std::uint64_t> failures_;
};

class GpuFaultCalls : public GpuFault, public testing::WithParamInterface<Fate> {
 protected:
  void SetUp() override { start({}, GetParam().fails_gpu() ? 2 : 1); }

  Case fatal_case() const {
    Case c = gpu_case(GetParam().degrade);
    c.kernel_waits = GetParam().kernel_waits();
    return c;
  }

  // Each rank calls this before its first replay from kLoss on.
  void meet_fate(std::uint32_t rank, const Group& group) const {
    const bool victim = rank == kVictim;
    if (victim && GetParam().death == Death::kInItsKernel) occupy_its_gpu();
    stage_->ready.arrive();
    if (victim && !GetParam().in_a_call()) sleep_ms(60000);  // until it is killed
    if (rank != kLatecomer || !GetParam().in_a_call()) return;
    const auto broken = [&] { return epd_group_check(group.get(), nullptr) != EPD_OK; };
    RANK_CHECK(eventually(30, broken), "nobody has died");
  }

  PlayOptions options(std::uint32_t rank, const Group& group) const {
    RankTimes& times = stage_->times[rank];
    PlayOptions o;
    o.on_failure = [&times] { set_first(times.told); };
    o.on_success = [&times, &group] {
      if (times.told != 0) set_first(times.again);
      if (times.again != 0 && epd_group_active(group.get(), kVictim) == 1) set_first(times.whole);
    };
    o.before = [this, rank, &group, met = false, waited = false](std::uint64_t next) mutable {
      if (next >= kLoss && !std::exchange(met, true)) meet_fate(rank, group);
      if (GetParam().degrade && next >= kRejoin && !std::exchange(waited, true)) stage_->joined.wait_for(1);
    };
    return o;
  }

  std::set<std::string> allowed() const {
    std::set<std::string> statuses{"RANK_LOST", "ABORTED"};
    if (GetParam().fails_gpu()) statuses.insert("ENGINE_RESTARTED");
    return statuses;
  }

  // A survivor, or the victim until it dies.
  std::string play_until_the_end(std::uint32_t rank) const {
    const Case c = fatal_case();
    const Session session(daemon().socket(), device_of(rank), c.wait_by_on(rank));
    const Keepsake keepsake(session, rank);
    {
      const Group group(session, c.config("calls", rank));
      PlayOptions o = options(rank, group);
      if (c.degrade) {
        o.finished = &stage_->finished;
      } else {
        o.end_op = ~std::uint64_t{0};
        o.end = EPD_RANK_LOST;
      }
      only_these(Player(group, c, rank, std::move(o)).run(), allowed());
      if (c.degrade) wait_for_the_others();
    }
    keepsake.check();
    if (!c.degrade) play_in_the_next_group(session, rank);
    return "";
  }

  void play_as_successor(const Session& session) const {
    const Case c = fatal_case();
    const Group group(session, c.config("calls", kVictim));
    stage_->joined.open();
    PlayOptions o;
    o.finished = &stage_->finished;
    only_these(Player(group, c, kVictim, std::move(o)).run(), {"ABORTED", "ENGINE_RESTARTED"});
    wait_for_the_others();
  }

  void play_in_the_next_group(const Session& session, std::uint32_t rank) const {
    const Case c = fatal_case();
    const Group group(session, c.config("next", rank));
    PlayOptions o;
    o.end_op = 20;
    o.on_success = [this, rank] { set_first(stage_->times[rank].whole); };
    only_these(Player(group, c, rank, std::move(o)).run(), {});
    wait_for_the_others();
  }

  void wait_for_the_others() const { stage_->seen.meet(kFaultRanks); }

  double kill(std::vector<RankProcess>& ranks) const {
    if (GetParam().in_a_call()) sleep_ms(100);  // the victim's stream gets to where it waits
    if (GetParam().death == Death::kWithItsEngine) return gpus_->kill_engine(ranks[kVictim], victims_gpu());
    if (GetParam().fails_gpu()) return gpus_->kill_in_a_kernel(ranks[kVictim], victims_gpu());
    const double killed = now_s();
    ranks[kVictim].kill(SIGKILL);
    // Its place is free; and one group of the two that degrade so is seen to continue before it is taken.
    const RankTimes& times = stage_->times[kLatecomer];
    const bool waits = GetParam().degrade && !GetParam().in_a_call();
    EXPECT_TRUE(eventually(20, [&] { return (waits ? times.again : times.told) != 0; }));
    return killed;
  }

  const Shared<Stage> stage_;
};

INSTANTIATE_TEST_SUITE_P(Deaths, GpuFaultCalls,
                         testing::Values(Fate{"between_operations", Death::kBetweenOperations, true},
                                         Fate{"between_operations_fail_fast", Death::kBetweenOperations,
                                              false},
                                         Fate{"in_its_kernel", Death::kInItsKernel, true},
                                         Fate{"in_its_kernel_fail_fast", Death::kInItsKernel, false},
                                         Fate{"waiting_by_kernel", Death::kWaitingByKernel, true},
                                         Fate{"waiting_by_memop", Death::kWaitingByMemop, true},
                                         Fate{"with_its_engine", Death::kWithItsEngine, true}),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(GpuFaultCalls, TheOthersGoOnReplaying) {
  std::vector<RankProcess> ranks =
      start_ranks(kFaultRanks, [&](std::uint32_t rank) { return play_until_the_end(rank); });
  ASSERT_TRUE(eventually(60, [&] { return stage_->ready.count == kFaultRanks; }));
  const double killed = kill(ranks);
  RankProcess newcomer = successor(*stage_, [&](const Session& session) -> std::string {
    if (GetParam().degrade) {
      play_as_successor(session);
    } else {
      play_in_the_next_group(session, kVictim);
    }
    return "";
  });
  expect_all_end_well(ranks, newcomer);
  print_times(std::string("calls, ") + GetParam().name, killed, *stage_);
  for (std::uint32_t rank = 0; rank < kFaultRanks; ++rank) {
    if (rank == kVictim) continue;
    EXPECT_NE(stage_->times[rank].told.load(), 0) << "rank " << rank;
    EXPECT_NE(stage_->times[rank].whole.load(), 0) << "rank " << rank;
  }
  if (!GetParam().fails_gpu()) {
    gpus_->expect_no_engine_died();
  } else if (GetParam().death == Death::kWithItsEngine) {
    gpus_->expect_only_this_engine_died(victims_gpu(), "signal 9");
  } else {
    gpus_->expect_only_this_engine_died(victims_gpu());
  }
}

}  // namespace
}  // namespace epd::test
