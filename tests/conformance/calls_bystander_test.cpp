// A group whose operations are calls beside clients that come and go, die, or ring nonsense on the same GPUs:
// it continues to replay, every round is bit-exact, and no engine is restarted.
#include "common/signal.h"
#include "replaying_ranks.h"
#include "stream_rounds.h"
#include "support/rank_bodies.h"

#include "proto/arena.h"
#include "proto/call_words.h"

#include <signal.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <random>

namespace epd::test {
namespace {

class CallsBystander : public StreamConformance {};
EPD_INSTANTIATE_CALLS(CallsBystander);

// A group whose ranks all replay and check, from now until finish().
class Undisturbed {
 public:
  Undisturbed(const Daemon& daemon, const Case& c, const std::string& group)
      : daemon_(daemon),
        engines_(daemon.engine_of_each_device()),
        num_ranks_(c.num_ranks),
        ranks_(replaying_ranks(daemon, c, group, [this](const ReplayingRank& self) { replay(self); })) {
    EXPECT_TRUE(goes_on(2));
  }
  bool goes_on(std::uint64_t rounds) const {
    const std::uint64_t until = log_->rounds + rounds;
    return eventually(60, [&] { return log_->rounds >= until; });
  }
  void finish() {
    EXPECT_TRUE(goes_on(3));
    log_->last.ask();
    expect_all_ok(wait_all(ranks_, 60));
    EXPECT_EQ(daemon_.engine_of_each_device(), engines_) << "an engine was restarted";
    std::printf("of %u ranks: %lu rounds; replay, copies and check of the longest took %.1f ms\n", num_ranks_,
                static_cast<unsigned long>(log_->rounds.load()),
                1e-3 * static_cast<double>(log_->longest_us.load()));
  }

 private:
  struct Log {
    std::atomic<std::uint64_t> rounds{0};  // of the rank that is ahead
    std::atomic<std::uint64_t> longest_us{0};
    LastRound last{};
    Gate finished{};
  };

  void replay(const ReplayingRank& self) const {
    for (std::uint64_t round = 0; log_->last.comes(self.rank, round); ++round) {
      const auto begin = std::chrono::steady_clock::now();
      self.play(round, round + 1);
      const auto took = std::chrono::steady_clock::now() - begin;
      const auto us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
      if (log_->longest_us < static_cast<std::uint64_t>(us))
        log_->longest_us = static_cast<std::uint64_t>(us);
      self.must_be(EPD_OK);
      if (log_->rounds <= round) log_->rounds = round + 1;
    }
    log_->finished.meet(num_ranks_);
  }

  const Daemon& daemon_;
  const std::vector<pid_t> engines_;
  const std::uint32_t num_ranks_;
  const Shared<Log> log_;
  std::vector<RankProcess> ranks_;
};

// ---- groups that come and go ----------------------------------------------------------------------

// In streams and without; each ends as it should or is killed between its operations. Shares of SMs follow
// priorities, which change meanwhile, as does the number of SMs.
TEST_P(CallsBystander, GroupsComeAndGo) {
  std::mt19937_64 random(base_seed() + 11000);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  const auto set = [&](const std::vector<std::string>& what) {
    std::vector<std::string> arguments = what;
    arguments.insert(arguments.begin(), "set");
    const CommandResult result = daemon().epctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  const std::string name = group_name();
  Undisturbed undisturbed(daemon(), stream_case(2, 1), name);
  for (std::uint32_t i = 0; i < 12; ++i) {
    Case c = stream_case(1 + below(2), 1 + below(2), static_cast<epd_layout_t>(below(3)));
    c.seed += i;
    const bool in_streams = below(2) != 0;
    c.priority = static_cast<std::int32_t>(below(16)) - 8;
    const bool killed = below(3) == 0;
    SCOPED_TRACE(c.describe() + (in_streams ? "; in streams" : "") + (killed ? "; killed" : ""));
    const std::string comer = group_name();
    Shared<Gate> played;
    std::vector<RankProcess> ranks =
        start_group(daemon(), c, comer, [&](const Group& group, std::uint32_t rank) -> std::string {
          if (in_streams) {
            Rounds rounds(group, c, rank, 4);
            for (std::uint64_t round = 0; round < 4; ++round) rounds.submit(round);
            rounds.must_finish();
            rounds.check_all();
          } else {
            rounds_without_a_stream(group, c, rank, 0, 4);
          }
          played->meet(c.num_ranks);
          if (killed) ::raise(SIGKILL);
          return "";
        });
    set({"group", name, "priority=" + std::to_string(static_cast<int>(below(16)) - 8)});
    set({"device", daemon().device(below(2)), "sms=" + std::to_string(16 + 8 * below(3))});
    EXPECT_TRUE(eventually(60, [&] { return played->count == c.num_ranks; }));
    for (const RankOutcome& outcome : wait_all(ranks, 60))
      EXPECT_EQ(outcome.ok, !killed) << outcome.to_string();
    EXPECT_TRUE(undisturbed.goes_on(1));
  }
  undisturbed.finish();
  for (std::uint32_t rank = 0; rank < 2; ++rank) set({"device", daemon().device(rank), "sms=32"});
}

// Processes that do not use epd. Under MPS a GPU begins no kernel for a while when one makes its context
// (daemon/device/README). A rank alone has the kind's waits on one GPU too, where two ranks would have MEMOP
// waits.
TEST_P(CallsBystander, ProcessesThatMakeAContextAndGo) {
  Undisturbed undisturbed(daemon(), stream_case(2, 1), group_name());
  Undisturbed alone(daemon(), stream_case(1, 1), group_name());
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE("process " + std::to_string(i));
    std::vector<RankProcess> comer;
    comer.emplace_back([]() -> std::string {
      const GpuStream context(0);
      return "";
    });
    expect_all_ok(wait_all(comer, 60));
    EXPECT_TRUE(undisturbed.goes_on(1));
    EXPECT_TRUE(alone.goes_on(1));
  }
  undisturbed.finish();
  alone.finish();
}

// One group has a rank elsewhere too, the other has none.
TEST_P(CallsBystander, AllGroupsOfAnEngineGoOnWhenItWasKilled) {
  Shared<Gate> played;
  Shared<Gate> killed;
  std::vector<RankProcess> ranks;
  Shared<Gate> told[2];
  const std::string names[] = {group_name(), group_name()};
  for (const std::uint32_t group : {0u, 1u}) {
    const Case c = stream_case(1 + group, 1, group == 0 ? EPD_LAYOUT_EXPERT : EPD_LAYOUT_PACKED);
    Gate& all = *told[group];
    for (RankProcess& rank : replaying_ranks(daemon(), c, names[group], [&](const ReplayingRank& self) {
           self.play(0, 3);
           played->arrive();
           killed->wait_for(1);
           self.must_become(EPD_ENGINE_RESTARTED);
           all.meet(c.num_ranks);
           self.resume();
           self.play(3, 8);
           self.must_be(EPD_OK);
           all.meet(2 * c.num_ranks);
         }))
      ranks.push_back(std::move(rank));
  }
  ASSERT_TRUE(eventually(60, [&] { return played->count == 3; }));
  ASSERT_EQ(send_signal(daemon().engine(0), SIGKILL), 0);
  killed->open();
  expect_all_ok(wait_all(ranks, 90));
}

// ---- nonsense -------------------------------------------------------------------------------------

// The words of a rank, which its client may write as it likes.
class OwnWords {
 public:
  OwnWords(const Group& group, const Case& c)
      : gpu_(group.gpu()),
        place_(group.slot_on_gpu(0) + abi::UserArenaLayout(c.shape()).calls),
        max_tokens_(c.max_tokens) {}

  // Each is refused: the session ends. In either ring; the client has made no calls without a stream.
  void ring_illegally(std::mt19937_64& random) const {
    const abi::CallWords words = read();
    const bool by_host = random() % 2 != 0;
    abi::Call call;
    call.number = by_host ? 0 : words.tail;
    call.op = abi::Op::kDispatch;
    call.num_tokens = 1;
    call.flagged = random() % 2 != 0;
    call.epoch = words.epoch & 0xff;
    switch (random() % 7) {
      case 0: call.slot = call.route = abi::kMaxDepth - 1; break;
      case 1: call.num_tokens = max_tokens_ + 1 + random() % 1000; break;
      case 2: call.op = abi::Op::kCombine; break;  // which takes its tokens from the routing
      case 3: call.flags = 0x8000; break;
      case 4:
        call.route = 1 + static_cast<std::uint32_t>(random() % ((1u << abi::kCallRouteBits) - 1));
        break;
      case 5: call.result = abi::kResultPlaces; break;
      default: call.number += abi::kCallSlots * (1 + random() % 1000);  // lies where another should
    }
    store(call, by_host);
  }

  // Words that may mean anything or nothing, the engine's too.
  void scribble(std::mt19937_64& random) const {
    const abi::CallWords words = read();
    const auto near = [&] { return words.tail + static_cast<std::uint32_t>(random() % 5) - 2; };
    switch (random() % 3) {
      case 0: {
        const std::uint64_t word = random();
        constexpr std::size_t kWords = std::size_t{2} * abi::kCallSlots * abi::PackedCall::kWords;
        static_assert(offsetof(abi::CallWords, host_calls) == kWords / 2 * sizeof(word));
        copy_to_gpu(gpu_, place_ + offsetof(abi::CallWords, calls) + random() % kWords * sizeof(word), &word,
                    sizeof(word));
        break;
      }
      case 1: {
        const auto any = [&] { return static_cast<std::uint32_t>(random()); };
        const bool likely = random() % 2 != 0;
        abi::Call call;
        call.number = near();
        call.op = static_cast<abi::Op>(random() % 4);
        call.slot = likely ? 0 : any() % 16;
        call.num_tokens = any() % 16;
        call.flagged = random() % 2 != 0;
        call.epoch = random() % 4 != 0 ? words.epoch & 0xff : 0;
        call.flags = likely ? 0 : any();
        call.sms = any() % 200;
        call.route = likely ? 0 : any();
        call.result = likely ? 0 : any();
        call.timeout_ms = likely ? 0 : any();
        store(call, random() % 2 != 0);
        break;
      }
      default: {
        constexpr std::size_t kFirst = offsetof(abi::CallWords, bell) / 4;
        const std::size_t word = kFirst + random() % (sizeof(abi::CallWords) / 4 - kFirst);
        const std::uint32_t value = random() % 2 != 0 ? near() : static_cast<std::uint32_t>(random());
        copy_to_gpu(gpu_, place_ + 4 * word, &value, 4);
      }
    }
  }

 private:
  abi::CallWords read() const {
    abi::CallWords words;
    copy_from_gpu(gpu_, &words, place_, sizeof(words));
    return words;
  }
  void store(const abi::Call& call, bool by_host) const {
    const abi::PackedCall packed = abi::pack(call);
    const std::size_t ring = by_host ? offsetof(abi::CallWords, host_calls) : offsetof(abi::CallWords, calls);
    copy_to_gpu(gpu_, place_ + ring + sizeof(packed) * (call.number % abi::kCallSlots), &packed,
                sizeof(packed));
    const std::uint32_t set = 1;
    copy_to_gpu(gpu_, place_ + offsetof(abi::CallWords, bell) + (by_host ? 4 : 0), &set, sizeof(set));
  }

  const int gpu_;
  std::byte* const place_;
  const std::uint32_t max_tokens_;
};

class CallsNonsense : public StreamConformance {
 protected:
  // `attack`: with the session, the group's words and a source of numbers, in a rank that has played two
  // rounds.
  using Attack = std::function<void(const Session&, const OwnWords&, std::mt19937_64&)>;
  void attack(std::uint64_t first_seed, const Attack& attack);
};
EPD_INSTANTIATE_CALLS(CallsNonsense);

void CallsNonsense::attack(std::uint64_t first_seed, const Attack& attack) {
  const Case alone = stream_case(1, 1);
  Undisturbed undisturbed(daemon(), stream_case(2, 1), group_name());
  for (std::uint64_t i = 0; i < 10; ++i) {
    const std::uint64_t seed = base_seed() + first_seed + i;
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::string name = group_name();
    std::vector<RankProcess> attacker;
    attacker.emplace_back([&]() -> std::string {
      std::mt19937_64 random(seed);
      const Session session(daemon().socket(), daemon().device(0), alone.wait_by_on(0));
      const Group group(session, alone.config(name.c_str(), 0));
      Replayed replayed(group, alone, 0);
      ReplayingRank{group, replayed, 0}.play(0, 2);
      attack(session, OwnWords(group, alone), random);
      return "";
    });
    EXPECT_EQ(daemon().epctl({"ops"}).exit_code, 0);
    expect_all_ok(wait_all(attacker, 60));
    EXPECT_TRUE(undisturbed.goes_on(1));
  }
  auto after =
      replaying_ranks(daemon(), alone, group_name(), [](const ReplayingRank& self) { self.play(0, 5); });
  expect_all_ok(wait_all(after, 60));
  undisturbed.finish();
}

TEST_P(CallsNonsense, WhoRingsIllegallyHurtsOnlyItself) {
  attack(12000, [](const Session& session, const OwnWords& words, std::mt19937_64& random) {
    words.ring_illegally(random);
    RANK_CHECK(eventually(20, [&] { return epd_session_check(session.get()) != EPD_OK; }), "it was taken");
    must(epd_session_check(session.get()), "the session", EPD_INVALID_ARGUMENT);
    sleep_ms(100);
    words.scribble(random);  // its session has ended, and nothing else that it has on the GPU
  });
}

TEST_P(CallsNonsense, WhoScribblesHurtsOnlyItself) {
  attack(12100, [](const Session&, const OwnWords& words, std::mt19937_64& random) {
    for (int n = 0; n < 200; ++n) words.scribble(random);  // past its session's end, if that comes
  });
}

}  // namespace
}  // namespace epd::test
