// kill -9 of a client at every step of attach, join, submit, wait and leave. Steps that a system call begins
// or ends are walked one by one (support/kill_points.h); those that only write to shared memory are made by
// hand. After each: the peer hears of it or never notices, the group's name and the dead rank's seat are
// free, a fresh group on the same devices is right to the bit, and the daemon holds what it held before.
#include "common/signal.h"
#include "fault.h"
#include "support/engine_pages.h"
#include "support/kill_points.h"
#include "support/raw_client.h"

#include "common/memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>

namespace epd::test {
namespace {

constexpr int kHangMs = 20000;
constexpr std::uint32_t kVictim = 0;
constexpr std::uint32_t kPeer = 1;

enum class Stretch { kAttach, kJoin, kSubmit, kWait, kWaitLong, kCombine, kLeave, kDetach, kNone };
constexpr std::array kStretches = {"attach",      "join",    "submit", "wait",
                                   "wait asleep", "combine", "leave",  "detach"};

std::string name_of(Stretch stretch) {
  return kStretches[static_cast<std::size_t>(stretch)];
}

struct Death {
  Gate first_over;             // the peer has seen the end of the group that the victim was in
  std::atomic<pid_t> waiting;  // the victim, when all it does is wait for its peer
};

void must_be_right(const std::string& difference) {
  RANK_CHECK(difference.empty(), difference);
}

// The victim's life: one round, then it goes. Each step may be its last.
std::string whole_life(const Daemon& daemon, const EnginePages& pages, const Case& c, const std::string& name,
                       Stretch traced, Death& death) {
  const auto step = [traced](Stretch here, const std::function<void()>& work) {
    if (here == traced) begin_stretch();
    work();
    if (here == traced) end_stretch();
  };
  Session session;
  Group group;
  step(Stretch::kAttach, [&] { session = Session(daemon.socket(), daemon.device(kVictim)); });
  step(Stretch::kJoin, [&] { group = Group(session, c.config(name.c_str(), kVictim)); });
  const std::vector<Input> inputs = make_inputs(c, 0);
  const epd_buffers_t buffers = group.buffers(0);
  fill_dispatch(c, buffers, inputs[kVictim]);
  // So that the call rings.
  RANK_CHECK(eventually(10, [&] { return pages.of(kVictim).sleep.sleeping == 1; }), "the engine sleeps");
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t dispatch;
  epd_dispatch_args_init(&dispatch);
  dispatch.num_tokens = inputs[kVictim].num_tokens;
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.weighted = c.weighted ? 1 : 0;
  epd_result_t result;
  epd_result_init(&result);
  step(Stretch::kSubmit, [&] { must(group.dispatch(&dispatch, &ticket, &combine.handle), "dispatch"); });
  const Stretch wait = traced == Stretch::kWaitLong ? Stretch::kWaitLong : Stretch::kWait;
  death.waiting = ::getpid();
  step(wait, [&] { must(group.wait(ticket, kHangMs, &result), "dispatch"); });
  must_be_right(check_dispatch(c, buffers, inputs, kVictim, result, nullptr));
  fill_combine(c, buffers, kVictim, 0, result.num_recv_rows);
  step(Stretch::kCombine, [&] {
    must(group.combine(&combine, &ticket), "combine");
    must(group.wait(ticket, kHangMs), "combine");
  });
  must_be_right(check_combine(c, buffers, inputs, kVictim, 0));
  step(Stretch::kLeave, [&] { group = Group(); });
  step(Stretch::kDetach, [&] { session = Session(); });
  return "";
}

bool over_or_asleep(pid_t pid) {
  return !is_running(pid) || process_state(pid) == 'S';
}

// Joins the first group and works in it until rank 0, whoever plays it, is gone. Returns what it saw.
// A late one does nothing before the victim sleeps or is dead.
std::string peer_of_the_dead(const Session& session, const Case& c, const std::string& name, bool late,
                             const Death& death) {
  const epd_group_config_t config = c.config(name.c_str(), kPeer);
  epd_group_t* joined = nullptr;
  const epd_status_t status = epd_group_join(session.get(), &config, &joined);
  if (status != EPD_OK) {
    must(status, "join", EPD_RANK_LOST);  // it died while the group started
    must_say("rank 0");
    return "lost while it started";
  }
  const Group group(joined);
  RANK_CHECK(!late || eventually(20, [&] { return death.waiting != 0 && over_or_asleep(death.waiting); }),
             "the victim neither sleeps nor dies");
  ScriptOptions options;
  options.rounds = 2;  // rank 0 does one at most
  options.order = Order::kInTurn;
  options.end = EPD_RANK_LOST;
  const ScriptStats stats = ScriptRunner(group, c, kPeer, options).run();
  RANK_CHECK(stats.completed <= 2, stats.to_string());
  must_say("rank 0");
  return "lost after " + std::to_string(stats.completed) + " operations";
}

// Plays the dead rank for a peer that still waits for it; then both form a group of their own.
std::string replacement(const Daemon& daemon, const Case& c, const std::string& name,
                        const Gate& first_over) {
  const Session session(daemon.socket(), daemon.device(kVictim));
  const double end = now_s() + 20;
  while (first_over.count == 0) {
    RANK_CHECK(now_s() < end, "the peer is in no group and hears of nothing");
    epd_group_config_t config = c.config(name.c_str(), kVictim);
    config.timeout_ms = 30;  // the peer may have heard of the death meanwhile
    epd_group_t* joined = nullptr;
    const epd_status_t status = epd_group_join(session.get(), &config, &joined);
    if (status == EPD_DEADLINE_EXCEEDED) continue;
    must(status, "join in place of the dead rank");
    const Group group(joined);
    ScriptOptions options;
    options.rounds = 1;
    ScriptRunner(group, c, kVictim, options).run();
    break;
  }
  return "";
}

class ClientKillPoints : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 2;
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    pages_ = std::make_unique<EnginePages>(*daemon_);
    before_ = settled_census(*daemon_);
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }

  // One death: `die` starts the victim in group `name`, kills it and says where. Returns what the peer saw.
  std::string one_death(const std::function<void(const std::string& name, Death& death)>& die,
                        bool late_peer) {
    const std::string name = "first-" + std::to_string(deaths_++);
    Shared<Death> death;
    RankProcess peer([&]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(kPeer));
      std::string saw = peer_of_the_dead(session, case_, name, late_peer, *death);
      death->first_over.arrive();
      fresh_group(session, kPeer, name);
      return saw;
    });
    die(name, *death);
    RankProcess stand_in([&]() -> std::string {
      replacement(*daemon_, case_, name, death->first_over);
      fresh_group(Session(daemon_->socket(), daemon_->device(kVictim)), kVictim, name);
      return "";
    });
    const RankOutcome outcome = peer.wait(40);
    EXPECT_TRUE(outcome.ok) << "peer " << outcome.to_string();
    const RankOutcome played = stand_in.wait(40);
    EXPECT_TRUE(played.ok) << "stand-in " << played.to_string();
    expect_same_census(*daemon_, before_);
    return outcome.text;
  }

  void fresh_group(const Session& session, std::uint32_t rank, const std::string& name) const {
    const Group group(session, case_.config((name + "-fresh").c_str(), rank));
    ScriptOptions options;
    options.rounds = 2;
    ScriptRunner(group, case_, rank, options).run();
  }

  // One death in a stretch. `kill` returns where, or nothing: the victim got through.
  std::optional<std::string> death_in(Stretch stretch,
                                      const std::function<std::optional<std::string>(pid_t)>& kill) {
    std::optional<std::string> point;
    const std::string saw = one_death(
        [&](const std::string& name, Death& death) {
          RankProcess victim([&] { return whole_life(*daemon_, *pages_, case_, name, stretch, death); });
          point = kill(victim.pid());
          const RankOutcome outcome = victim.wait(30);
          EXPECT_TRUE(point ? outcome.signal == SIGKILL : outcome.ok) << outcome.to_string();
        },
        stretch == Stretch::kWaitLong);
    const std::string text = name_of(stretch) + ": " + point.value_or("got through");
    std::printf("%-34s peer: %s\n", text.c_str(), saw.c_str());
    EXPECT_FALSE(HasFailure()) << "killed at " << text;
    return point;
  }

  // Kills the victim at stop after stop of a stretch, until it gets through. These must be among the stops.
  // Which calls the n-th victim makes depends on who is faster: what the walk missed has tries of its own.
  void expect_walked(Stretch stretch, const std::vector<std::string>& wanted) {
    std::vector<std::string> missing = wanted;
    for (int n = 0; n < 200 && !HasFailure(); ++n) {
      const auto point = death_in(stretch, [n](pid_t victim) { return kill_at(victim, n); });
      if (!point) break;
      std::erase(missing, *point);
    }
    for (const std::string& name : missing) {
      bool there = false;
      for (int i = 0; i < 5 && !there && !HasFailure(); ++i) {
        there = death_in(stretch, [&name](pid_t victim) {
                  return kill_at(victim, name) ? std::optional(name) : std::nullopt;
                }).has_value();
      }
      EXPECT_TRUE(there) << "no kill point of " << name_of(stretch) << " is " << name;
    }
  }

  const Case case_ = fault_case(2, 2);
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<EnginePages> pages_;
  SystemCensus before_;
  int deaths_ = 0;
};

// Steps of submit and wait that no system call marks.
enum class Memory {
  kHalfWritten,
  kWritten,
  kRung,
  kAsleep,
  kCountsSeen,
  kEndSeen,
  kCount,
};
constexpr std::array kMemoryPoints = {"call: half written", "call: written, bell not rung",
                                      "call: bell rung",    "wait: says that it sleeps",
                                      "wait: counts seen",  "wait: end seen"};
static_assert(kMemoryPoints.size() == static_cast<std::size_t>(Memory::kCount));

void fill_by_hand(const Case& c, const RawRank& rank, const Input& input) {
  const abi::UserArenaLayout layout(c.shape());
  const auto at = [&](abi::Region region) { return rank.arena() + layout.at(0, region); };
  std::memcpy(at(abi::Region::kX), input.x.data(), input.x.size() * sizeof(input.x[0]));
  auto* topk_idx = reinterpret_cast<std::int32_t*>(at(abi::Region::kTopkIdx));
  std::copy(input.topk_idx.begin(), input.topk_idx.end(), topk_idx);
  std::memcpy(at(abi::Region::kTopkWeights), input.topk_weights.data(),
              input.topk_weights.size() * sizeof(input.topk_weights[0]));
}

// Does the first dispatch up to the point and no further.
void by_hand(const Daemon& daemon, const Case& c, const std::string& name, Memory point) {
  abi::Join join{};
  abi::set_text(join.group, name.data(), name.size());
  join.rank = kVictim;
  join.timeout_ms = 20000;
  join.shape = c.shape();
  const RawRank rank(daemon.socket(), daemon.device(kVictim), join);
  const Input input = make_input(c, kVictim, 0);
  fill_by_hand(c, rank, input);
  abi::Call call;
  call.op = abi::Op::kDispatch;
  call.epoch = static_cast<std::uint32_t>(rank.joined().epoch);
  call.num_tokens = input.num_tokens;
  call.flags = abi::kFlagWeights;
  call.timeout_ms = kHangMs;
  RANK_CHECK(eventually(10, [&] { return rank.b().engine_sleep.sleeping == 1; }), "the engine falls asleep");
  rank.write(call, point == Memory::kHalfWritten ? abi::PackedCall::kWords / 2 : abi::PackedCall::kWords);
  if (point <= Memory::kWritten) return;
  if (point == Memory::kAsleep) rank.a().client_sleep.sleeping = 1;
  rank.ring();
  if (point <= Memory::kAsleep) return;
  RANK_CHECK(eventually(10, [&] { return rank.counted(); }), "counts come");
  if (point == Memory::kCountsSeen) return;
  abi::CallEnd end;
  RANK_CHECK(eventually(10, [&] { return rank.ended(end); }), "it ends");
  RANK_CHECK(end.ending == abi::CallEnding::kCarriedOut, std::to_string(static_cast<int>(end.ending)));
}

TEST_F(ClientKillPoints, StepsInMemoryOnly) {
  for (std::size_t i = 0; i < kMemoryPoints.size(); ++i) {
    SCOPED_TRACE(kMemoryPoints[i]);
    const auto point = static_cast<Memory>(i);
    const std::string saw = one_death(
        [&](const std::string& name, Death&) {
          RankProcess victim([&]() -> std::string {
            by_hand(*daemon_, case_, name, point);
            send_signal(::getpid(), SIGKILL);
            return "";
          });
          const RankOutcome outcome = victim.wait(30);
          EXPECT_EQ(outcome.signal, SIGKILL) << outcome.to_string();
        },
        false);
    std::printf("%-46s peer: %s\n", kMemoryPoints[i], saw.c_str());
    if (point == Memory::kHalfWritten) {
      EXPECT_EQ(saw, "lost after 0 operations");
    }
    // Operations that every rank had submitted run to their end, even if nobody sees it.
    if (point >= Memory::kCountsSeen) {
      EXPECT_EQ(saw, "lost after 1 operations");
    }
    if (HasFailure()) return;
  }
}

// Nobody takes the dead rank's place: its peers wait no longer than they asked for, and hear who is missing.
TEST_F(ClientKillPoints, AJoinThatNobodyCompletes) {
  std::vector<RankProcess> peers;
  for (const Stretch stretch : {Stretch::kAttach, Stretch::kJoin}) {
    for (int n = 0; n < 200; ++n) {
      const std::string name = "alone-" + std::to_string(peers.size());
      peers.emplace_back([&, name]() -> std::string {
        const Session session(daemon_->socket(), daemon_->device(kPeer));
        epd_group_config_t config = case_.config(name.c_str(), kPeer);
        config.timeout_ms = 500;
        epd_group_t* group = nullptr;
        must(epd_group_join(session.get(), &config, &group), "join", EPD_DEADLINE_EXCEEDED);
        must_say("missing: 0");
        return "";
      });
      Shared<Death> death;
      RankProcess victim([&] { return whole_life(*daemon_, *pages_, case_, name, stretch, *death); });
      const std::optional<std::string> point = kill_at(victim.pid(), n);
      const bool asked = !point || *point == "after sendmsg #1";
      if (stretch == Stretch::kJoin ? asked : !point) {  // the group is complete: no peer for this test
        victim.kill(SIGKILL);
        peers.pop_back();
        break;
      }
    }
  }
  EXPECT_GT(peers.size(), 20u);
  expect_all_ok(wait_all(peers, 40));
  expect_same_census(*daemon_, before_);
}

TEST_F(ClientKillPoints, Attach) {
  expect_walked(Stretch::kAttach, {"before connect #1", "after connect #1", "before sendmsg #1",
                                   "after sendmsg #1", "after recvmsg #1", "after eventfd #1"});
}

TEST_F(ClientKillPoints, Join) {
  expect_walked(Stretch::kJoin,
                {"before sendmsg #1", "after sendmsg #1", "before recvmsg #1", "after recvmsg #1"});
}

TEST_F(ClientKillPoints, Submit) {
  expect_walked(Stretch::kSubmit, {"before sendto #1", "after sendto #1"});
}

TEST_F(ClientKillPoints, Wait) {
  expect_walked(Stretch::kWait, {});
  expect_walked(Stretch::kWaitLong, {"before ppoll #1", "after ppoll #1"});
  expect_walked(Stretch::kCombine, {});
}

TEST_F(ClientKillPoints, LeaveAndDetach) {
  expect_walked(Stretch::kLeave, {"before sendmsg #1", "after sendmsg #1", "after recvmsg #1"});
  expect_walked(Stretch::kDetach, {"before sendmsg #1", "after sendmsg #1"});
}

}  // namespace
}  // namespace epd::test
