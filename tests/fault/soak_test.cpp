// Clients and engines are killed at random, they and the supervisor are stopped, for as long as one likes:
//   EPD_SOAK_SECONDS=600 EPD_TEST_SEED=7 build/dev/bin/soak_test
// Several groups work meanwhile, under both loss policies. Every operation that succeeds is right to the bit,
// every failure has one of the statuses that the faults explain, nobody waits for ever, a group whose devices
// and clients are spared notices nothing, and in the end the daemon holds what it held at first.
#include "common/signal.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>

namespace epd::test {
namespace {

constexpr std::uint32_t kDevices = 5;
constexpr std::uint32_t kSpared = 4;  // the device whose engine and clients are left alone
constexpr double kHangSeconds = 45;   // no call may take that long
constexpr std::size_t kMaxSeats = 16;

// That the supervisor may grow by; a quarantine has 256 MiB.
constexpr std::uint64_t kBandKib = kMemoryIsOurs ? 4096 : 300 * 1024;

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Seat {
  std::uint32_t group;
  std::uint32_t rank;
  std::uint32_t device;
};

struct GroupPlan {
  std::string name;
  Case shape;
  std::uint32_t timeout_ms;  // of operations
  Order order;
};

// The counts that a seat's process reports; its successors continue them.
struct Progress {
  std::atomic<std::uint64_t> completed, restarted, deadlines, lost, rejoined, generations, joins_failed;
  std::atomic<double> alive_at;
};

struct Board {
  std::array<Progress, kMaxSeats> seats;
  std::atomic<bool> stop;
};

struct Stopped {};  // thrown to leave a script that has no end

void beat(Progress& progress) {
  progress.alive_at = now_s();
}

// The faults explain these and no others.
void count_failure(Progress& progress, bool degrade, epd_status_t status) {
  beat(progress);
  switch (status) {
    case EPD_ENGINE_RESTARTED: ++progress.restarted; return;
    case EPD_DEADLINE_EXCEEDED: ++progress.deadlines; return;
    case EPD_RANK_LOST: ++progress.lost; return;
    case EPD_ABORTED:
      if (degrade) {
        ++progress.rejoined;
        return;
      }
      break;
    default: break;
  }
  RANK_FAIL(std::string("an operation ended with ") + epd_status_name(status) + ": " + epd_last_error());
}

// Under degrade a group continues for as long as it has ranks: the script has no end but `stop`.
ScriptOptions script_options(const GroupPlan& plan, Board& board, Progress& progress) {
  const bool degrade = plan.shape.degrade;
  ScriptOptions options;
  options.rounds = degrade ? 20000 : 40;
  options.order = plan.order;
  options.timeout_ms = plan.timeout_ms;
  options.recover = true;
  if (!degrade) options.end = EPD_RANK_LOST;
  options.on_submit = [&board, &progress, degrade](std::uint64_t) {
    beat(progress);
    if (degrade && board.stop) throw Stopped{};
  };
  options.on_complete = [&progress](std::uint64_t) {
    ++progress.completed;
    beat(progress);
  };
  options.on_failure = [&progress, degrade](epd_status_t status) {
    count_failure(progress, degrade, status);
  };
  return options;
}

// A join may give these while ranks die: some are missing, one died while the group started, the seat's
// former owner has not yet been reaped; and under degrade the group ended while it was to be rejoined.
void must_be_explained(epd_status_t status, bool degrade, double& taken_since) {
  const std::string said = std::string(epd_status_name(status)) + ": " + epd_last_error();
  if (status == EPD_INVALID_ARGUMENT && said.find("is taken by session") != std::string::npos) {
    if (taken_since == 0) taken_since = now_s();
    RANK_CHECK(now_s() - taken_since < 5, said);
    sleep_ms(1);
    return;
  }
  RANK_CHECK(status == EPD_DEADLINE_EXCEEDED || status == EPD_RANK_LOST || (degrade && status == EPD_ABORTED),
             said);
}

// Joins, works until the group is lost or its script is done, leaves, and again.
std::string life_in_danger(const Daemon& daemon, const GroupPlan& plan, const Seat& seat, Board& board,
                           Progress& progress) {
  std::optional<Session> session;
  double taken_since = 0;
  for (std::uint64_t generation = 0; !board.stop; ++generation) {
    beat(progress);
    note("attach");
    if (!session) session.emplace(daemon.socket(), daemon.device(seat.device), EPD_WAIT_BY_MEMOP, 20000);
    epd_group_config_t config = plan.shape.config(plan.name.c_str(), seat.rank);
    config.timeout_ms = 1000;
    epd_group_t* joined = nullptr;
    note("join " + plan.name);
    const epd_status_t status = epd_group_join(session->get(), &config, &joined);
    beat(progress);
    if (status != EPD_OK) {
      ++progress.joins_failed;
      must_be_explained(status, plan.shape.degrade, taken_since);
      continue;
    }
    taken_since = 0;
    {
      const Group group(joined);
      try {
        ScriptRunner(group, plan.shape, seat.rank, script_options(plan, board, progress)).run();
      } catch (const Stopped&) {
        return "";
      }
      ++progress.generations;
      note("leave");
    }
    if (generation % 3 == 2) session.reset();
  }
  return "";
}

// In one group from beginning to end; no failure is allowed, until the first rank leaves at the end.
std::string life_in_peace(const Daemon& daemon, const GroupPlan& plan, const Seat& seat, Board& board,
                          Progress& progress) {
  const Session session(daemon.socket(), daemon.device(seat.device));
  const Group group(session, plan.shape.config(plan.name.c_str(), seat.rank));
  ScriptOptions options = script_options(plan, board, progress);
  options.rounds = 20;
  options.recover = false;
  while (!board.stop) {
    const ScriptStats stats = ScriptRunner(group, plan.shape, seat.rank, options).run();
    RANK_CHECK(stats.failures.empty() || board.stop, stats.to_string());
    options.first_op += 2 * std::uint64_t{options.rounds};
    ++progress.generations;
    sleep_ms(5);
  }
  return "";
}

class Soak : public testing::Test {
 protected:
  static constexpr std::uint32_t kPeaceful = 0;  // index of the spared group

  void SetUp() override {
    seed_ = number_from("EPD_TEST_SEED", 1);
    seconds_ = static_cast<double>(number_from("EPD_SOAK_SECONDS", 10));
    random_.seed(seed_);
    DaemonOptions options;
    options.devices = kDevices;
    options.settings = patient_settings();
    options.settings.back() = {"log.level", "\"warning\""};
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
    make_plans();
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

  void add_group(const std::string& name, std::uint32_t num_ranks, std::uint32_t timeout_ms) {
    GroupPlan plan{name, random_case(seed_ * 100 + plans_.size(), num_ranks), timeout_ms,
                   static_cast<Order>(plans_.size() % 3)};
    plan.shape.max_recv_rows = 0;  // the room of a random case is for its first rounds
    plan.shape.hidden = std::min(plan.shape.hidden, 512u);  // the checks, too, run on two cores
    plan.shape.max_tokens = std::min(plan.shape.max_tokens, 24u);
    const auto index = static_cast<std::uint32_t>(plans_.size());
    for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
      seats_.push_back({index, rank, index == kPeaceful ? kSpared : (rank + index) % kSpared});
    }
    plans_.push_back(std::move(plan));
  }

  void make_plans() {
    add_group("peace", 2, 60000);
    add_group("pair", 2, 20000);
    add_group("hasty", 3, 150);   // stopped clients and dead engines make its deadlines pass
    add_group("wide", 5, 20000);  // two ranks on one device
    add_group("single", 1, 20000);
    add_group("degrade", 3, 20000);
    plans_.back().shape.degrade = true;
    ASSERT_LE(seats_.size(), kMaxSeats);
  }

  void seat(std::size_t i) {
    const Seat& s = seats_[i];
    beat(board_->seats[i]);
    processes_[i] = RankProcess([this, i, s]() -> std::string {
      const GroupPlan& plan = plans_[s.group];
      return s.group == kPeaceful ? life_in_peace(*daemon_, plan, s, *board_, board_->seats[i])
                                  : life_in_danger(*daemon_, plan, s, *board_, board_->seats[i]);
    });
  }

  std::string name_of(std::size_t i) const {
    return plans_[seats_[i].group].name + " rank " + std::to_string(seats_[i].rank);
  }

  std::size_t any_victim() {
    for (;;) {
      const std::size_t i = below(seats_.size());
      if (seats_[i].group != kPeaceful) return i;
    }
  }

  void kill_client(std::size_t i) {
    processes_[i].kill(SIGKILL);
    const RankOutcome outcome = processes_[i].wait(10);
    EXPECT_EQ(outcome.signal, SIGKILL) << name_of(i) << " " << outcome.to_string();
    due_.erase(i);
    seat(i);
    ++tally_["clients killed"];
  }

  void stop_client(std::size_t i) {
    if (due_.contains(i)) return;
    processes_[i].kill(SIGSTOP);
    due_[i] = now_s() + some_time();
    ++tally_["clients stopped"];
  }

  void kill_engine(std::uint32_t device) {
    const pid_t pid = daemon_->engine(device);
    if (pid <= 0) return;
    send_signal(pid, SIGKILL);
    ++tally_["engines killed"];
  }

  // A stopped process is killed or continues; its pid is not another's while its parent has not reaped it,
  // and a SIGCONT to its next owner does no harm.
  void stop_for_a_while(pid_t pid, const char* what) {
    if (pid <= 0 || pids_due_.contains(pid)) return;
    send_signal(pid, SIGSTOP);
    pids_due_[pid] = now_s() + some_time();
    ++tally_[what];
  }

  // Short of any deadline; now and then longer than most.
  double some_time() {
    return static_cast<double>(below(16) == 0 ? 1000 + below(3000) : 1 + below(300)) / 1000;
  }

  void continue_stopped(bool all) {
    const double now = now_s();
    std::erase_if(due_, [&](const auto& entry) {
      if (!all && entry.second > now) return false;
      processes_[entry.first].kill(SIGCONT);
      beat(board_->seats[entry.first]);
      return true;
    });
    std::erase_if(pids_due_, [&](const auto& entry) {
      if (!all && entry.second > now) return false;
      send_signal(entry.first, SIGCONT);
      return true;
    });
  }

  void one_fault() {
    const std::uint64_t dice = below(100);
    if (dice < 40) {
      kill_client(any_victim());
    } else if (dice < 58) {
      stop_client(any_victim());
    } else if (dice < 76) {
      kill_engine(static_cast<std::uint32_t>(below(kSpared)));
    } else if (dice < 84) {
      stop_for_a_while(daemon_->engine(static_cast<std::uint32_t>(below(kSpared))), "engines stopped");
    } else if (dice < 92) {  // a client and an engine at once
      const std::size_t i = any_victim();
      kill_engine(static_cast<std::uint32_t>(below(kSpared)));
      kill_client(i);
    } else if (dice < 94) {  // an engine twice in a row
      const auto device = static_cast<std::uint32_t>(below(kSpared));
      kill_engine(device);
      sleep_ms(static_cast<int>(below(60)));
      kill_engine(device);
    } else if (dice < 97) {
      stop_for_a_while(daemon_->pid(), "stops of the supervisor");
    } else if (dice < 98) {  // all ranks of a group
      const std::uint32_t group = seats_[any_victim()].group;
      for (std::size_t i = 0; i < seats_.size(); ++i)
        if (seats_[i].group == group) kill_client(i);
    } else {
      for (std::uint32_t device = 0; device < kSpared; ++device) kill_engine(device);
    }
  }

  bool has_ended(std::size_t i) const {
    siginfo_t info{};
    const auto pid = static_cast<id_t>(processes_[i].pid());
    return ::waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
  }

  // False if a seat has been in one call for too long, or has ended while it should not.
  bool is_well(std::size_t i, bool may_end) {
    const bool ended = has_ended(i);
    if (ended ? may_end : now_s() - board_->seats[i].alive_at < kHangSeconds) return true;
    ADD_FAILURE() << name_of(i) << (ended ? " has ended: " : " hangs: ")
                  << processes_[i].wait(0.1).to_string();
    return false;
  }

  bool all_well() {
    for (std::size_t i = 0; i < seats_.size(); ++i)
      if (!is_well(i, false)) return false;
    return daemon_->running();
  }

  // Slow machines are slow; what counts is that every call returns.
  void let_all_end() {
    board_->stop = true;
    continue_stopped(true);
    for (std::size_t i = 0; i < seats_.size(); ++i) {
      while (!HasFailure() && !has_ended(i) && is_well(i, true)) sleep_ms(5);
      if (HasFailure()) return;
      const RankOutcome outcome = processes_[i].wait(1);
      EXPECT_TRUE(outcome.ok) << name_of(i) << " " << outcome.to_string();
    }
  }

  void rage() {
    const double end = now_s() + seconds_;
    double next = now_s() + 0.5;
    while (now_s() < end && !HasFailure() && all_well()) {
      continue_stopped(false);
      if (now_s() >= next) {
        one_fault();
        next = now_s() + static_cast<double>(5 + below(120)) / 1000;
      }
      sleep_ms(3);
    }
  }

  void print_tally() const {
    std::printf("soak of %.0f s, seed %llu:", seconds_, static_cast<unsigned long long>(seed_));
    for (const auto& [what, count] : tally_)
      std::printf(" %llu %s,", static_cast<unsigned long long>(count), what.c_str());
    std::printf("\n");
    for (std::size_t i = 0; i < seats_.size(); ++i) {
      const Progress& p = board_->seats[i];
      const std::pair<const char*, std::uint64_t> columns[] = {{"right to the bit", p.completed},
                                                               {"ENGINE_RESTARTED", p.restarted},
                                                               {"DEADLINE_EXCEEDED", p.deadlines},
                                                               {"RANK_LOST", p.lost},
                                                               {"ABORTED", p.rejoined},
                                                               {"generations", p.generations},
                                                               {"joins failed", p.joins_failed}};
      std::printf("  %-16s", name_of(i).c_str());
      for (const auto& [what, count] : columns)
        std::printf(" %7llu %s", static_cast<unsigned long long>(count), what);
      std::printf("\n");
    }
  }

  std::uint64_t seed_ = 1;
  double seconds_ = 0;
  std::mt19937_64 random_;
  std::unique_ptr<Daemon> daemon_;
  std::vector<GroupPlan> plans_;
  std::vector<Seat> seats_;
  Shared<Board> board_;
  std::array<RankProcess, kMaxSeats> processes_;
  std::map<std::size_t, double> due_;  // stopped clients, and when they go on
  std::map<pid_t, double> pids_due_;   // others
  std::map<std::string, std::uint64_t> tally_;
};

TEST_F(Soak, RandomKillsAndStops) {
  const SystemCensus before = settled_census(*daemon_);
  for (std::size_t i = 0; i < seats_.size(); ++i) seat(i);
  rage();
  if (!HasFailure()) let_all_end();
  print_tally();
  if (HasFailure()) return;
  for (std::size_t i = 0; i < seats_.size(); ++i) EXPECT_GT(board_->seats[i].completed, 0u) << name_of(i);
  expect_same_census(*daemon_, before);
  expect_serves(*daemon_, kDevices, "after");
  expect_same_census(*daemon_, before);
  const std::uint64_t grown = take_census(daemon_->pid()).own_kib;
  std::printf("supervisor: own %llu KiB before, %llu KiB after\n",
              static_cast<unsigned long long>(before.processes[0].own_kib),
              static_cast<unsigned long long>(grown));
  EXPECT_LE(grown, before.processes[0].own_kib + kBandKib);
}

}  // namespace
}  // namespace epd::test
