// Operations that are calls: any sequence of them, graphs that are replayed, ranks in streams and ranks
// without, what tickets tell, and what becomes of streams when something fails.
#include "common/signal.h"
#include "replaying_ranks.h"
#include "stream_rounds.h"

#include <signal.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>

namespace epd::test {
namespace {

class Sequence;

class Calls : public StreamConformance {
 protected:
  // Runs random cases, from this seed on.
  void run_sequences(std::uint64_t seed, const std::function<void(Sequence&)>& run);
};
EPD_INSTANTIATE_CALLS(Calls);

// ---- any sequence ---------------------------------------------------------------------------------

// The operations of one rank: as the case's seed says, the same on all ranks, all enqueued before any is
// looked at. Each has its copies of the slot: as it was before, and after.
class Sequence {
 public:
  Sequence(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t length)
      : group_(group),
        case_(c),
        rank_(rank),
        bytes_(group.slot_bytes()),
        stream_(group.gpu()),
        copies_(pinned_memory(group.gpu(), std::size_t{2} * length * bytes_)),
        num_tokens_(reinterpret_cast<std::uint32_t*>(pinned_memory(group.gpu(), std::size_t{length} * 4))),
        counts_(reinterpret_cast<std::byte*>(allocate_on_gpu(group.gpu(), std::size_t{length} * 4).address)),
        random_(c.seed) {
    steps_.reserve(length);
    for (std::uint32_t i = 0; i < length; ++i) add(i);
  }

  void run() {
    for (std::size_t i = 0; i < steps_.size(); ++i) fill(i);
    enqueue_all();
    finish(1);
    release();
  }
  // As one graph, with other rows, choices and numbers of tokens each time.
  void replay(std::uint32_t times) {
    for (Step& s : steps_) s.reads_tokens = s.kind == Kind::kDispatch;
    stream_.begin_capture();
    enqueue_all();
    const GpuGraph graph = stream_.end_capture();
    for (std::uint32_t i = 0; i < times; ++i) {
      for (Step& s : steps_) s.round = Round(s.round.data + kRounds, s.round.routing + kRounds);
      for (std::size_t step = 0; step < steps_.size(); ++step) fill(step);
      stream_.launch(graph);
      finish(i + 1);
    }
    release();
  }

 private:
  enum class Kind { kNoop, kDispatch, kCached, kCombine };
  struct Step {
    Kind kind = Kind::kNoop;
    std::uint32_t slot = 0;
    Round round{0};
    std::size_t of = 0;  // the step whose routing it uses
    bool keep = false;
    bool defer = false;
    bool reads_tokens = false;  // num_tokens_at
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
  };
  static constexpr std::size_t kNone = ~std::size_t{0};
  // The rounds of a replay. There are so many that a step has as many biases in each, and the same row
  // format: its arguments say both.
  static constexpr std::uint64_t kRounds = std::uint64_t{17} * 2 * 3;

  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(random_() % n); }

  void add(std::uint32_t number) {
    Step s;
    s.slot = below(case_.depth);
    const std::uint32_t kind = routed_.empty() ? 1 : below(8);
    s.kind = kind == 0   ? Kind::kNoop
             : kind <= 3 ? Kind::kDispatch
             : kind == 4 ? Kind::kCached
                         : Kind::kCombine;
    s.defer = s.kind != Kind::kNoop && below(4) == 0;
    s.reads_tokens = s.kind == Kind::kDispatch && below(2) != 0;
    s.keep = s.kind == Kind::kDispatch && kept_.size() < case_.num_handles && below(2) != 0;
    if (s.kind == Kind::kDispatch) {
      s.round = Round(number, number % kRoundsThatFit);
      s.of = number;
      if (s.keep) {
        kept_.push_back(number);
      } else {
        std::erase_if(routed_, [&](std::size_t i) { return !steps_[i].keep && steps_[i].slot == s.slot; });
      }
      routed_.push_back(number);
    } else if (s.kind != Kind::kNoop) {
      s.of = routed_[below(routed_.size())];
      s.round = Round(number, steps_[s.of].round.routing);
    }
    steps_.push_back(s);
  }

  std::string at(std::size_t i) const {
    const char* const names[] = {"noop", "dispatch", "cached dispatch", "combine"};
    return case_.describe() + "; rank " + std::to_string(rank_) + ", step " + std::to_string(i) + " (" +
           names[static_cast<std::size_t>(steps_[i].kind)] + " on slot " + std::to_string(steps_[i].slot) +
           ")";
  }
  std::byte* before(std::size_t i) const { return copies_ + 2 * i * bytes_; }
  std::byte* after(std::size_t i) const { return before(i) + bytes_; }

  // Fills the copy that is uploaded when the stream gets there.
  void fill(std::size_t i) {
    const Step& s = steps_[i];
    if (s.kind == Kind::kNoop) return;
    std::memset(before(i), kPoison, bytes_);
    const epd_buffers_t given = group_.buffers_in(before(i));
    if (s.kind == Kind::kCombine) {
      fill_combine(case_, given, rank_, s.round, rows_of(s.of));
      return;
    }
    const Input input = make_input(case_, rank_, s.round);
    fill_dispatch(case_, given, input, s.kind == Kind::kCached);
    num_tokens_[i] = input.num_tokens;
  }

  void enqueue_all() {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      note(at(i));
      enqueue(i);
      // The wait for a deferred operation comes after the next operation, which is on another slot.
      if (deferred_ != kNone && deferred_ != i) receive();
      if (steps_[i].defer) deferred_ = i;
      if (deferred_ == i && (i + 1 == steps_.size() || steps_[i + 1].slot == steps_[i].slot)) receive();
    }
  }

  void enqueue(std::size_t i) {
    Step& s = steps_[i];
    if (s.kind == Kind::kNoop) {
      must(epd_noop(group_.get(), s.slot, stream_.get(), &s.ticket), at(i));
      return;
    }
    stream_.copy_in(group_.slot_on_gpu(s.slot), before(i), bytes_);
    must(s.kind == Kind::kCombine ? combine(s) : dispatch(i), at(i));
    if (!s.defer) stream_.copy_out(after(i), group_.slot_on_gpu(s.slot), bytes_);
  }

  epd_status_t dispatch(std::size_t i) {
    Step& s = steps_[i];
    epd_dispatch_args_t args = dispatch_args(case_.at(s.round), s.kind == Kind::kCached ? 0 : num_tokens_[i]);
    args.slot = s.slot;
    args.handle = s.kind == Kind::kCached ? steps_[s.of].handle : 0;
    args.keep_handle = s.keep ? 1 : 0;
    args.defer_receive = s.defer ? 1 : 0;
    if (s.reads_tokens) {
      stream_.copy_in(counts_ + 4 * i, &num_tokens_[i], 4);
      args.num_tokens = 0;
      args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(counts_ + 4 * i);
    }
    return epd_dispatch(group_.get(), &args, stream_.get(), &s.ticket, &s.handle);
  }

  epd_status_t combine(Step& s) {
    epd_combine_args_t args = combine_args(case_, s.round);
    args.slot = s.slot;
    args.handle = steps_[s.of].handle;
    args.defer_receive = s.defer ? 1 : 0;
    return epd_combine(group_.get(), &args, stream_.get(), &s.ticket);
  }

  void receive() {
    const std::size_t i = std::exchange(deferred_, kNone);
    must(epd_ticket_wait_on_stream(group_.get(), steps_[i].ticket, stream_.get()), "wait for " + at(i));
    stream_.copy_out(after(i), group_.slot_on_gpu(steps_[i].slot), bytes_);
  }

  std::uint32_t rows_of(std::size_t dispatch) const {
    const Round& round = steps_[dispatch].round;
    const auto inputs = make_inputs(case_, round);
    return kernels::reference::dispatch_to(case_.at(round).params(), inputs, rank_).num_recv_rows;
  }

  // `runs`: how often all has run.
  void finish(std::uint32_t runs) const {
    RANK_CHECK(stream_.finish(kStreamSeconds), "the stream waits");
    must_have_gone_well(group_);
    std::uint64_t index = 0;
    for (const Step& s : steps_) index += s.kind != Kind::kNoop ? 1 : 0;
    index *= runs - 1;
    for (std::size_t i = 0; i < steps_.size(); ++i) check(i, runs, index);
  }
  void release() const {
    for (const std::size_t i : kept_) must(epd_handle_release(group_.get(), steps_[i].handle), "release");
  }

  // `index`: of the group's next operation.
  void check(std::size_t i, std::uint32_t runs, std::uint64_t& index) const {
    const Step& s = steps_[i];
    epd_result_t result;
    epd_result_init(&result);
    must(epd_ticket_wait(group_.get(), s.ticket, kWaitMs, &result), at(i));
    RANK_CHECK(result.op_index == index && result.runs == runs,
               at(i) + " has number " + std::to_string(result.op_index) + ", not " + std::to_string(index) +
                   ", and has run " + std::to_string(result.runs) + " times, not " + std::to_string(runs));
    if (s.kind == Kind::kNoop) return;
    ++index;
    const epd_buffers_t got = group_.buffers_in(after(i));
    const auto inputs = make_inputs(case_, s.round);
    std::string text;
    if (s.kind == Kind::kCombine) {
      text = check_combine(case_, got, inputs, rank_, s.round);
    } else {
      text = check_dispatch(case_.at(s.round), got, inputs, rank_, result, nullptr);
    }
    RANK_CHECK(text.empty(), at(i) + ": " + text);
  }

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const std::size_t bytes_;
  const GpuStream stream_;
  std::byte* const copies_;
  std::uint32_t* const num_tokens_;
  std::byte* const counts_;
  std::mt19937_64 random_;
  std::vector<Step> steps_;
  std::vector<std::size_t> routed_;  // dispatches whose routing stands
  std::vector<std::size_t> kept_;
  std::size_t deferred_ = kNone;
};

void Calls::run_sequences(std::uint64_t seed, const std::function<void(Sequence&)>& run) {
  for (std::uint64_t i = 0; i < 9; ++i) {
    Case c = random_case(base_seed() + seed + i, 2 + i % 3);
    c.sum_ranks = 0;
    c.degrade = false;
    c.defer = false;
    c.layout = static_cast<epd_layout_t>(i % 3);
    c.alignment = c.layout == EPD_LAYOUT_PACKED ? 4 : 1;
    c.max_recv_rows = 0;
    c.depth = 2 + i % 2;
    c.num_handles = 2;
    c.kernel_waits = kernel_waits() | 2;  // one rank does in any case
    add_formats(c);
    // A noop needs no peer, but does not come after one that has left.
    Shared<Gate> finished;
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      Sequence sequence(group, c, rank, 24);
      run(sequence);
      finished->meet(c.num_ranks);
    });
  }
}

TEST_P(Calls, AnySequenceIsBitExact) {
  run_sequences(9000, [](Sequence& sequence) { sequence.run(); });
}

TEST_P(Calls, AnySequenceMayBeAGraph) {
  run_sequences(9500, [](Sequence& sequence) { sequence.replay(4); });
}

// ---- graphs ---------------------------------------------------------------------------------------

TEST_P(Calls, AGraphIsReplayedWithWhatTheRegionsHoldThen) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT}) {
    const Case c = stream_case(3, 1, layout);
    auto ranks = replaying_ranks(daemon(), c, group_name(), [&](const ReplayingRank& self) {
      self.play(0, 20);
      must_have_gone_well(self.group);
    });
    expect_all_ok(wait_all(ranks, 90));
  }
}

TEST_P(Calls, TheTicketsOfAGraphTellOfEachReplay) {
  const Case c = stream_case(2, 1);
  auto ranks = replaying_ranks(daemon(), c, group_name(), [&](const ReplayingRank& self) {
    epd_group_t* const group = self.group.get();
    const epd_ticket_t ticket = self.replayed.dispatched();
    RANK_CHECK(epd_ticket_pending(group, ticket) == 1, "it has not run");
    must(epd_ticket_wait(group, ticket, EPD_NO_WAIT, nullptr), "wait", EPD_WOULD_BLOCK);
    for (std::uint64_t round = 0; round < 6; ++round) {
      self.replayed.play(round);
      epd_counts_t counts;
      epd_counts_init(&counts);
      must(epd_ticket_counts(group, ticket, kWaitMs, &counts), "counts");
      const auto want = kernels::reference::dispatch_to(c.params(), inputs_of(c, round), self.rank);
      RANK_CHECK(counts.num_recv_rows == want.num_recv_rows, "M of round " + std::to_string(round));
      RANK_CHECK(std::equal(want.rank_offsets.begin(), want.rank_offsets.end(), counts.rank_offsets),
                 "rank_offsets of round " + std::to_string(round));
      if (round % 2 == 0) {
        self.replayed.check(round);
        must(epd_ticket_wait(group, ticket, EPD_NO_WAIT, nullptr), "a second wait", EPD_WOULD_BLOCK);
        continue;
      }
      struct Told {
        std::atomic<bool> called{false};
        epd_result_t result{};
      } told;
      const auto hook = [](const epd_result_t* result, void* user) {
        static_cast<Told*>(user)->result = *result;
        static_cast<Told*>(user)->called = true;
      };
      must(epd_ticket_on_complete(group, ticket, hook, &told), "hook");
      RANK_CHECK(eventually(30, [&] { return told.called.load(); }), "the hook is called");
      RANK_CHECK(told.result.status == EPD_OK && told.result.runs == round + 1 &&
                     told.result.op_index == 2 * round && told.result.num_recv_rows == want.num_recv_rows,
                 "the hook is told of round " + std::to_string(told.result.runs));
    }
    must(epd_ticket_drop(group, ticket), "drop");
    must(epd_ticket_wait(group, ticket, EPD_NO_WAIT, nullptr), "wait", EPD_NOT_FOUND);
    must(epd_ticket_drop(group, ticket), "drop", EPD_NOT_FOUND);
  });
  expect_all_ok(wait_all(ranks, 90));
}

// ---- streams and none ------------------------------------------------------------------------------

TEST_P(Calls, RanksNeedNotAllDoTheSame) {
  for (const bool deferred : {false, true}) {
    Case c = stream_case(3, 2);
    c.defer = deferred;
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      if (rank == 1) {
        rounds_without_a_stream(group, c, rank, 0, 12);
        return;
      }
      Rounds rounds(group, c, rank, 12);
      for (std::uint64_t i = 0; i < 12; ++i) rounds.submit(i);
      rounds.must_finish();
      rounds.check_all();
    });
  }
}

TEST_P(Calls, ARankMayDoBothInTurn) {
  const Case c = stream_case(3, 2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, 40);
    for (std::uint64_t turn = 0; turn < 10; ++turn) {
      for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(4 * turn + i);
      rounds.must_finish();
      rounds.check_all();
      rounds_without_a_stream(group, c, rank, 4 * turn + 2, 4 * turn + 4);
    }
  });
}

// A rank alone: a noop of the host's comes while the stream waits for a peer, and ends after the stream's
// operation.
TEST_P(Calls, WithoutAStreamACallComesBehindWhatRuns) {
  const Case c = stream_case(2, 2);
  Shared<Gate> waits;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, 1);
    if (rank == 1) waits->wait_for(1);
    rounds.submit(0);
    if (rank == 0) {
      RANK_CHECK(
          eventually(30, [&] { return daemon().epctl({"ops"}).out.find("wait_ready") != std::string::npos; }),
          "its kernel does not wait for the peer");
      epd_ticket_t noop = 0;
      must(epd_noop(group.get(), 1, EPD_NO_STREAM, &noop), "noop");
      must(epd_ticket_wait(group.get(), noop, 50, nullptr), "noop", EPD_DEADLINE_EXCEEDED);
      must(epd_ticket_wait_on_stream(group.get(), noop, rounds.stream().get()), "without a stream",
           EPD_INVALID_ARGUMENT);
      waits->arrive();
      must(epd_ticket_wait(group.get(), noop, kWaitMs, nullptr), "noop");
    }
    rounds.must_finish();
    rounds.check_all();
    waits->meet(3);
  });
}

TEST_P(Calls, ResultsAreKeptOfTheLast1024) {
  const Case c = stream_case(1, 1);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const GpuStream stream(group.gpu());
    std::vector<epd_ticket_t> tickets(abi::kOnceResults + 2);
    for (std::size_t i = 0; i < tickets.size(); ++i)
      must(epd_noop(group.get(), 0, stream.get(), &tickets[i]), "noop " + std::to_string(i));
    RANK_CHECK(stream.finish(kStreamSeconds), "the stream waits");
    for (std::size_t i = 0; i < tickets.size(); ++i) {
      must(epd_ticket_wait(group.get(), tickets[i], kWaitMs, nullptr), "noop " + std::to_string(i),
           i < 2 ? EPD_NOT_FOUND : EPD_OK);
    }
  });
}

// ---- failures -------------------------------------------------------------------------------------

// Afterwards the group continues, and so does the graph.
TEST_P(Calls, ABadChoiceIsToldByTicketsAndByCheck) {
  Shared<Gate> checked;
  Shared<Gate> told;
  auto ranks = replaying_ranks(daemon(), stream_case(2, 1), group_name(), [&](const ReplayingRank& self) {
    self.play(0, 1);
    self.must_be(EPD_OK);
    checked->meet(2);
    if (self.rank == 0) {
      self.replayed.play_with_a_bad_choice();
    } else {
      self.replayed.play(1);
    }
    self.must_be(EPD_INVALID_ARGUMENT);
    must_say("topk_idx");
    self.replayed.must_end(EPD_INVALID_ARGUMENT);
    must_say("topk_idx");
    self.replayed.play(2);  // not carried out, and holds nobody
    self.must_be(EPD_INVALID_ARGUMENT);
    self.replayed.must_end(EPD_INVALID_ARGUMENT);
    told->meet(2);
    self.resume();
    self.play(3, 8);
    self.must_be(EPD_OK);
    told->meet(4);
  });
  expect_all_ok(wait_all(ranks, 90));
}

TEST_P(Calls, AGraphGoesOnAfterAnEngineThatWasKilled) {
  for (const std::uint32_t victim : {0u, 1u}) {
    SCOPED_TRACE("the engine of rank " + std::to_string(victim));
    Shared<Gate> played;
    Shared<Gate> killed;
    Shared<Gate> told;
    auto ranks = replaying_ranks(daemon(), stream_case(2, 1), group_name(), [&](const ReplayingRank& self) {
      self.play(0, 1);
      played->arrive();
      killed->wait_for(1);
      if (self.rank == 0) self.replayed.play(1);  // rank 1 does not come
      self.must_become(EPD_ENGINE_RESTARTED);
      told->meet(2);
      self.resume();
      self.play(2, 6);
      self.must_be(EPD_OK);
      told->meet(4);
    });
    ASSERT_TRUE(eventually(60, [&] { return played->count == 2; }));
    const pid_t engine = daemon().engine(victim % daemon().devices());
    ASSERT_GT(engine, 0);
    ASSERT_EQ(send_signal(engine, SIGKILL), 0);
    killed->open();
    expect_all_ok(wait_all(ranks, 90));
  }
}

// Rank 1 dies between two of its calls; rank 0 waits for it.
TEST_P(Calls, APeerThatDiesBetweenItsCalls) {
  for (const bool degrade : {false, true}) {
    SCOPED_TRACE(degrade ? "degrade" : "fail fast");
    Case c = stream_case(2, 1);
    c.degrade = degrade;
    auto ranks = replaying_ranks(daemon(), c, group_name(), [&](const ReplayingRank& self) {
      self.play(0, 1);
      if (self.rank == 1) ::raise(SIGKILL);
      self.replayed.play(1);
      self.must_be(EPD_RANK_LOST);
      if (!degrade) return;
      self.resume();
      RANK_CHECK(epd_group_active(self.group.get(), 1) == 0, "it is lost");
      RANK_CHECK((self.group.active_mask(2) == std::vector<std::int32_t>{1, 0}), "its mask says so too");
      self.play(2, 6, {1});
      self.must_be(EPD_OK);
    });
    const auto outcomes = wait_all(ranks, 90);
    EXPECT_TRUE(outcomes[0].ok) << outcomes[0].to_string();
    EXPECT_FALSE(outcomes[1].ok);
  }
}

// The same graph before, without, and with a process that has taken the lost one's place.
TEST_P(Calls, ARankThatRejoins) {
  Case c = stream_case(2, 1);
  c.degrade = true;
  const std::string name = group_name();
  Shared<Gate> alone;
  Shared<Gate> together;
  const auto play_together = [&](const ReplayingRank& self) {
    together->meet(2);
    self.play(6, 9);
    together->meet(4);
  };
  std::vector<RankProcess> processes;
  processes.push_back(replaying_rank(daemon(), c, name, 0, [&](const ReplayingRank& self) {
    self.play(0, 3);
    self.must_become(EPD_RANK_LOST);
    self.resume();
    self.play(3, 6, {1});
    self.must_be(EPD_OK);
    alone->arrive();
    self.must_become(EPD_ABORTED);  // rank 1 has rejoined
    self.resume();
    play_together(self);
  }));
  processes.push_back(
      replaying_rank(daemon(), c, name, 1, [&](const ReplayingRank& self) { self.play(0, 3); }));
  processes.emplace_back([&]() -> std::string {
    alone->wait_for(1);
    as_replaying_rank(daemon(), c, name, 1, play_together);
    return "";
  });
  expect_all_ok(wait_all(processes, 90));
}

TEST_P(Calls, MoreTokensThanThereMayBeEndTheSession) {
  const Case c = stream_case(1, 1);
  with_ranks(c, [&](const Session& session, const Group& group, std::uint32_t) {
    const GpuStream stream(group.gpu());
    auto* const n = reinterpret_cast<std::uint32_t*>(pinned_memory(group.gpu(), 4));
    std::byte* const n_at = allocate_on_gpu(group.gpu(), 4).address;
    *n = 0xffffff00;
    stream.copy_in(n_at, n, 4);
    epd_dispatch_args_t args = dispatch_args(c, 0);
    args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(n_at);
    epd_ticket_t ticket = 0;
    must(epd_dispatch(group.get(), &args, stream.get(), &ticket, nullptr), "dispatch");
    RANK_CHECK(stream.finish(kStreamSeconds), "the stream waits");
    must(epd_group_check(group.get(), nullptr), "check", EPD_INVALID_ARGUMENT);
    must(epd_session_check(session.get()), "the session", EPD_INVALID_ARGUMENT);
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "the ticket", EPD_INVALID_ARGUMENT);
  });
}

}  // namespace
}  // namespace epd::test
