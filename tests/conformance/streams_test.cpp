// Operations in streams of the application's: rounds that are enqueued far ahead of what has run, and streams
// that go on whoever dies.
#include "conformance.h"

#include "support/cuda_memory.h"

#include <signal.h>
#include <cstring>
#include <map>

namespace epd::test {
namespace {

class Streams : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Devices, Streams, testing::Values("cuda"),
                         [](const auto& tested) { return tested.param; });

constexpr double kStreamSeconds = 60;  // longer than any operation's deadline

Case stream_case(std::uint32_t num_ranks, std::uint32_t depth, epd_layout_t layout = EPD_LAYOUT_COMPACT) {
  Case c;
  c.seed = base_seed() + 7000;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 2;
  c.max_tokens = 8;
  c.depth = depth;
  c.layout = layout;
  c.alignment = layout == EPD_LAYOUT_PACKED ? 4 : 1;
  return c;
}

// The expert answers a row with the row, so rows must be numbers that can be added.
Input input_of(const Case& c, std::uint32_t rank, std::uint64_t round) {
  Input input = make_input(c, rank, round);
  std::vector<std::uint16_t> row(c.hidden);
  for (std::uint32_t t = 0; t < input.num_tokens; ++t) {
    make_y_row(c, rank, round, t, row.data());
    std::memcpy(&input.x[std::size_t{t} * c.hidden * 2], row.data(), row.size() * 2);
  }
  return input;
}

std::vector<Input> inputs_of(const Case& c, std::uint64_t round) {
  std::vector<Input> inputs;
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) inputs.push_back(input_of(c, rank, round));
  return inputs;
}

// A ring that is full says so, and takes more as soon as the engine has.
template <typename Submit>
epd_status_t when_there_is_room(Submit submit) {
  for (const double end = now_s() + kStreamSeconds;;) {
    const epd_status_t status = submit();
    if (status != EPD_WOULD_BLOCK || now_s() > end) return status;
    must_say("ring is full");
    sleep_ms(1);
  }
}

// Rounds of one rank, all in one stream: upload, dispatch, an expert, combine, downloads.
class Rounds {
 public:
  // No memory is taken while streams wait: pinning some waits for them.
  Rounds(const Group& group, const Case& c, std::uint32_t rank, std::size_t most)
      : group_(group), case_(c), rank_(rank), bytes_(group.slot_bytes()), stream_(group.gpu()) {
    left_ = most * kCopies;
    free_ = pinned_memory(group.gpu(), left_ * bytes_);
    rounds_.reserve(most);
  }
  GpuStream& stream() { return stream_; }

  // Combines on the slot after the dispatch's, if it is told to.
  void submit(std::uint64_t number, std::uint32_t timeout_ms = 20000, bool elsewhere = false) {
    must(try_submit(number, timeout_ms, elsewhere), "round " + std::to_string(number));
  }
  // The status of the first operation that was refused.
  epd_status_t try_submit(std::uint64_t number, std::uint32_t timeout_ms = 20000, bool elsewhere = false) {
    Round& r = add(number);
    const auto slot = static_cast<std::uint32_t>(number % case_.depth);
    const std::uint32_t other = elsewhere ? (slot + 1) % case_.depth : slot;
    upload(r, slot);
    epd_status_t status = dispatch(r, slot, timeout_ms);
    if (status != EPD_OK) return status;
    stream_.copy_out(r.received, group_.slot_on_gpu(slot), bytes_);
    answer(slot, other);
    status = combine(r, other, timeout_ms);
    if (status == EPD_OK) stream_.copy_out(r.combined, group_.slot_on_gpu(other), bytes_);
    return status;
  }
  // Of a round whose dispatch has been completed before.
  epd_status_t try_submit_combine(std::uint64_t number) {
    Round& r = add(number);
    const auto slot = static_cast<std::uint32_t>(number % case_.depth);
    r.handle = handles_[number];
    upload(r, slot);
    const auto y = answer_of(inputs_of(case_, number), rank_).y;
    std::byte* const place = take();
    if (!y.empty()) std::memcpy(place, y.data(), y.size() * 2);
    stream_.copy_in(group_.buffers_in(group_.slot_on_gpu(slot)).y, place, y.size() * 2);
    const epd_status_t status = combine(r, slot, 20000);
    if (status == EPD_OK) stream_.copy_out(r.combined, group_.slot_on_gpu(slot), bytes_);
    return status;
  }

  void must_finish() { RANK_CHECK(stream_.finish(kStreamSeconds), "the stream waits"); }

  // Of all since the last such call.
  void check_all() {
    for (const Round& r : rounds_) {
      epd_result_t result = EPD_RESULT_INIT;
      must(epd_ticket_wait(group_.get(), r.dispatch, kWaitMs, &result), name(r, "dispatch"));
      must(epd_ticket_wait(group_.get(), r.combine, kWaitMs, nullptr), name(r, "combine"));
      const std::vector<Input> inputs = inputs_of(case_, r.number);
      const std::string text =
          check_dispatch(case_, group_.buffers_in(r.received), inputs, rank_, result, nullptr);
      RANK_CHECK(text.empty(), name(r, "dispatch") + ": " + text);
      check_out(r, inputs);
    }
    rounds_.clear();
  }
  // False if the engine was restarted under some of them.
  bool check_those_that_ended_well() {
    bool good = true;
    const auto ended_well = [&](const Round& r, epd_ticket_t ticket, epd_result_t* result, const char* what) {
      if (ticket == 0) return false;
      const epd_status_t status = epd_ticket_wait(group_.get(), ticket, kWaitMs, result);
      if (status == EPD_OK) return true;
      must(status, name(r, what), EPD_ENGINE_RESTARTED);
      good = false;
      return false;
    };
    for (const Round& r : rounds_) {
      const std::vector<Input> inputs = inputs_of(case_, r.number);
      epd_result_t result = EPD_RESULT_INIT;
      if (ended_well(r, r.dispatch, &result, "dispatch")) {
        const std::string text =
            check_dispatch(case_, group_.buffers_in(r.received), inputs, rank_, result, nullptr);
        RANK_CHECK(text.empty(), name(r, "dispatch") + ": " + text);
      }
      if (ended_well(r, r.combine, nullptr, "combine")) check_out(r, inputs);
    }
    rounds_.clear();
    return good;
  }
  void all_must_fail(epd_status_t status) {
    for (const Round& r : rounds_) {
      must(epd_ticket_wait(group_.get(), r.dispatch, kWaitMs, nullptr), name(r, "dispatch"), status);
      must(epd_ticket_wait(group_.get(), r.combine, kWaitMs, nullptr), name(r, "combine"), status);
    }
    rounds_.clear();
  }

 private:
  struct Round {
    std::uint64_t number = 0;
    std::byte* given = nullptr;
    std::byte* received = nullptr;
    std::byte* combined = nullptr;
    epd_ticket_t dispatch = 0;
    epd_ticket_t combine = 0;
    epd_handle_t handle = 0;
  };
  static constexpr std::size_t kCopies = 3;

  std::byte* take() {
    RANK_CHECK(left_-- > 0, "more rounds than were planned");
    return std::exchange(free_, free_ + bytes_);
  }
  Round& add(std::uint64_t number) {
    Round r;
    r.number = number;
    r.given = take();
    r.received = take();
    r.combined = take();
    rounds_.push_back(r);
    return rounds_.back();
  }
  static std::string name(const Round& r, const char* what) {
    return std::string(what) + " of round " + std::to_string(r.number);
  }

  void upload(const Round& r, std::uint32_t slot) {
    std::memset(r.given, kPoison, bytes_);
    fill_dispatch(case_, group_.buffers_in(r.given), input_of(case_, rank_, r.number));
    stream_.copy_in(group_.slot_on_gpu(slot), r.given, bytes_);
  }

  epd_status_t dispatch(Round& r, std::uint32_t slot, std::uint32_t timeout_ms) {
    epd_dispatch_args_t args = dispatch_args(case_, input_of(case_, rank_, r.number).num_tokens);
    args.slot = slot;
    args.timeout_ms = timeout_ms;
    args.on_stream = 1;
    args.stream = stream_.get();
    const epd_status_t status =
        when_there_is_room([&] { return epd_dispatch(group_.get(), &args, &r.dispatch, &r.handle); });
    handles_[r.number] = r.handle;
    if (status == EPD_OK && case_.defer)
      must(epd_ticket_wait_on_stream(group_.get(), r.dispatch, stream_.get()), "wait on the stream");
    return status;
  }

  void answer(std::uint32_t from_slot, std::uint32_t to_slot) {
    const epd_buffers_t from = group_.buffers_in(group_.slot_on_gpu(from_slot));
    const epd_buffers_t to = group_.buffers_in(group_.slot_on_gpu(to_slot));
    const abi::GroupShape shape = case_.shape();
    stream_.copy(to.y, from.recv_x, abi::region_bytes(shape, abi::Region::kY));
    if (from_slot == to_slot) return;
    stream_.copy(to.topk_weights, from.topk_weights, abi::region_bytes(shape, abi::Region::kTopkWeights));
  }

  epd_status_t combine(Round& r, std::uint32_t slot, std::uint32_t timeout_ms) {
    epd_combine_args_t args = combine_args(case_, r.number);
    args.slot = slot;
    args.handle = r.handle;
    args.timeout_ms = timeout_ms;
    args.on_stream = 1;
    args.stream = stream_.get();
    const epd_status_t status =
        when_there_is_room([&] { return epd_combine(group_.get(), &args, &r.combine); });
    if (status == EPD_OK && case_.defer)
      must(epd_ticket_wait_on_stream(group_.get(), r.combine, stream_.get()), "wait on the stream");
    return status;
  }

  // What the expert makes of what the rank receives.
  Answer answer_of(const std::vector<Input>& inputs, std::uint32_t rank) const {
    const auto received = kernels::reference::dispatch_to(case_.params(), inputs, rank);
    Answer answer;
    answer.y.resize(received.recv_x.size() / 2);
    if (!answer.y.empty()) std::memcpy(answer.y.data(), received.recv_x.data(), received.recv_x.size());
    return answer;
  }

  void check_out(const Round& r, const std::vector<Input>& inputs) const {
    std::vector<Answer> answers;
    for (std::uint32_t rank = 0; rank < case_.num_ranks; ++rank) answers.push_back(answer_of(inputs, rank));
    const auto want =
        kernels::reference::combine_to(case_.params(), inputs, answers, {case_.weighted, false}, rank_);
    const auto* out = static_cast<const std::uint16_t*>(group_.buffers_in(r.combined).out);
    for (std::size_t i = 0; i < want.out.size(); ++i) {
      RANK_CHECK(out[i] == want.out[i], name(r, "combine") + ": out[" + std::to_string(i) + "] is " +
                                            std::to_string(out[i]) + ", not " + std::to_string(want.out[i]));
    }
  }

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const std::size_t bytes_;
  GpuStream stream_;
  std::byte* free_ = nullptr;
  std::size_t left_ = 0;  // slots' copies from there
  std::vector<Round> rounds_;
  std::map<std::uint64_t, epd_handle_t> handles_;
};

std::uint64_t epoch_of(const Group& group) {
  epd_resume_info_t info = EPD_RESUME_INFO_INIT;
  must(epd_group_resume(group.get(), 20000, &info), "resume");
  return info.epoch;
}

// A rank that had nothing in flight may not have heard of the break yet.
void resume_past(const Group& group, std::uint64_t epoch, std::uint64_t resume_op) {
  epd_resume_info_t info = EPD_RESUME_INFO_INIT;
  const bool resumed = eventually(60, [&] {
    must(epd_group_resume(group.get(), 60000, &info), "resume");
    return info.epoch > epoch;
  });
  RANK_CHECK(resumed, "still in epoch " + std::to_string(epoch));
  RANK_CHECK(info.resume_op == resume_op, std::to_string(info.resume_op));
}

// ---- far ahead ---------------------------------------------------------------------------------

// All is enqueued on all ranks before anything can begin.
TEST_P(Streams, RoundsAreEnqueuedBeforeAnyHasBegun) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT}) {
    constexpr std::uint64_t kRounds = 12;
    const Case c = stream_case(4, 2, layout);
    Shared<Gate> enqueued;
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      Rounds rounds(group, c, rank, kRounds);
      rounds.stream().hold();
      for (std::uint64_t i = 0; i < kRounds; ++i) rounds.submit(i);
      RANK_CHECK(!rounds.stream().idle(), "it is held");
      enqueued->arrive();
      enqueued->wait_for(c.num_ranks);
      rounds.stream().let_go();
      rounds.must_finish();
      rounds.check_all();
    });
  }
}

TEST_P(Streams, ACombineMayBeOnAnotherSlot) {
  constexpr std::uint64_t kRounds = 12;
  const Case c = stream_case(2, 3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, kRounds);
    for (std::uint64_t i = 0; i < kRounds; ++i) rounds.submit(i, 20000, true);
    rounds.must_finish();
    rounds.check_all();
  });
}

// More than the ring holds, and nobody asks for a ticket until the end.
TEST_P(Streams, ManyRoundsOnOneSlot) {
  constexpr std::uint64_t kRounds = 120;
  const Case c = stream_case(2, 1);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, kRounds);
    for (std::uint64_t i = 0; i < kRounds; ++i) rounds.submit(i);
    rounds.must_finish();
    rounds.check_all();
  });
}

TEST_P(Streams, StreamsOfTwoGroupsDoNotWaitForEachOther) {
  const Case c = stream_case(2, 1);
  const std::string name = group_name();
  with_ranks(c, [&](const Session& session, const Group& group, std::uint32_t rank) {
    const Group second(session, c.config(name.c_str(), rank));
    Rounds held(group, c, rank, 4);
    Rounds free(second, c, rank, 4);
    held.stream().hold();
    for (std::uint64_t i = 0; i < 4; ++i) held.submit(i);
    for (std::uint64_t i = 0; i < 4; ++i) free.submit(i);
    free.must_finish();
    free.check_all();
    RANK_CHECK(!held.stream().idle(), "it is held");
    held.stream().let_go();
    held.must_finish();
    held.check_all();
  });
}

// ---- the other ways to begin and to wait -------------------------------------------------------

TEST_P(Streams, WithDeferReceiveAStreamWaitsWhenToldTo) {
  Case c = stream_case(2, 2);
  c.sizes = Sizes::kFull;
  Shared<Gate> begun;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const GpuStream stream(group.gpu());
    const GpuStream receiver(group.gpu());
    const std::size_t bytes = group.slot_bytes();
    std::byte* const copy = pinned_memory(group.gpu(), bytes);
    const Input input = make_input(c, rank, 0);
    fill_dispatch(c, group.buffers_in(copy), input);
    if (rank == 1) begun->wait_for(1);
    stream.copy_in(group.slot_on_gpu(0), copy, bytes);
    epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
    args.defer_receive = 1;
    args.on_stream = 1;
    args.stream = stream.get();
    epd_ticket_t ticket = 0;
    must(epd_dispatch(group.get(), &args, &ticket, nullptr), "dispatch");
    RANK_CHECK(stream.finish(kStreamSeconds), "nobody told it to wait");
    must(epd_ticket_wait_on_stream(group.get(), ticket, receiver.get()), "wait on a stream");
    receiver.copy_out(copy, group.slot_on_gpu(0), bytes);
    if (rank == 0) {
      RANK_CHECK(!receiver.idle(), "rank 1 has sent nothing");
      begun->arrive();
    }
    RANK_CHECK(receiver.finish(kStreamSeconds), "the dispatch has ended");
    must(epd_ticket_wait_sent(group.get(), ticket, kWaitMs), "wait_sent");
    epd_result_t result = EPD_RESULT_INIT;
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, &result), "dispatch");
    const std::string text =
        check_dispatch(c, group.buffers_in(copy), make_inputs(c, 0), rank, result, nullptr);
    RANK_CHECK(text.empty(), text);
  });
}

TEST_P(Streams, DeferredRoundsAreEnqueuedAhead) {
  constexpr std::uint64_t kRounds = 12;
  Case c = stream_case(2, 2);
  c.defer = true;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, kRounds);
    for (std::uint64_t i = 0; i < kRounds; ++i) rounds.submit(i);
    rounds.must_finish();
    rounds.check_all();
  });
}

// Of one rank: rounds with noops on the same slots and stream.
void rounds_and_noops(const Case& c, const Group& group, std::uint32_t rank, bool ahead) {
  Rounds rounds(group, c, rank, 8);
  std::vector<epd_ticket_t> noops;
  const auto noop = [&](std::uint32_t slot) {
    epd_ticket_t ticket = 0;
    must(when_there_is_room(
             [&] { return epd_noop_on_stream(group.get(), slot, rounds.stream().get(), &ticket); }),
         "noop");
    noops.push_back(ticket);
  };
  rounds.stream().hold();
  noop(0);
  RANK_CHECK(!rounds.stream().idle(), "it is held");
  if (!ahead) rounds.stream().let_go();
  for (std::uint64_t i = 0; i < 8; ++i) {
    rounds.submit(i);
    if (!ahead) rounds.must_finish();
    noop(i % 2);
  }
  rounds.stream().let_go();
  for (std::uint32_t i = 0; i < 200; ++i) noop(i % 2);
  rounds.must_finish();
  rounds.check_all();
  for (const epd_ticket_t ticket : noops)
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "noop");
}

TEST_P(Streams, NoopsComeInTheirTurn) {
  const Case c = stream_case(1, 2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    rounds_and_noops(c, group, rank, false);
  });
}

// Not yet: the engine hands a noop to its lane at once, before operations that came first and wait for a
// place there. The noop waits for the stream, the stream for these, and these for the noop.
TEST_P(Streams, DISABLED_NoopsBetweenRoundsFarAhead) {
  const Case c = stream_case(1, 2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    rounds_and_noops(c, group, rank, true);
  });
}

// ---- when things die ---------------------------------------------------------------------------

// Two rounds that succeed, two of rank 0's that nobody answers and that end with `status` on all tickets, and
// four more after them. `waiting` opens when rank 0's stream waits; rank 1 goes on when it has seen the end.
void break_and_go_on(const Case& c, const Group& group, std::uint32_t rank, std::uint32_t timeout_ms,
                     epd_status_t status, Gate& waiting, Gate& failed) {
  Rounds rounds(group, c, rank, 8);
  const std::uint64_t epoch = epoch_of(group);
  for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(i);
  rounds.must_finish();
  rounds.check_all();
  waiting.arrive();
  waiting.wait_for(c.num_ranks);
  if (rank == 0) {
    for (std::uint64_t i = 2; i < 4; ++i) rounds.submit(i, timeout_ms);
    waiting.arrive();
    rounds.must_finish();
    rounds.all_must_fail(status);
    failed.arrive();
  } else {
    failed.wait_for(1);
  }
  resume_past(group, epoch, 4);
  for (std::uint64_t i = 2; i < 6; ++i) rounds.submit(i);
  rounds.must_finish();
  rounds.check_all();
}

TEST_P(Streams, APeerThatDoesNotComeHoldsAStreamUntilTheDeadline) {
  const Case c = stream_case(2, 1);
  Shared<Gate> waiting;
  Shared<Gate> failed;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    break_and_go_on(c, group, rank, 300, EPD_DEADLINE_EXCEEDED, *waiting, *failed);
  });
}

TEST_P(Streams, AnEngineThatIsKilledHoldsNoStream) {
  for (const std::uint32_t victim : {0u, 1u}) {
    SCOPED_TRACE("the engine of rank " + std::to_string(victim));
    const Case c = stream_case(2, 1);
    const std::string name = group_name();
    Shared<Gate> waiting;
    Shared<Gate> failed;
    std::vector<RankProcess> ranks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank]() -> std::string {
        const Session session(daemon().socket(), daemon().device(rank));
        const Group group(session, c.config(name.c_str(), rank));
        break_and_go_on(c, group, rank, 30000, EPD_ENGINE_RESTARTED, *waiting, *failed);
        return "";
      });
    }
    ASSERT_TRUE(eventually(60, [&] { return waiting->count == 3; }));
    sleep_ms(50);  // so that it is in the kernel, or about to be
    const pid_t engine = daemon().engine(victim % daemon().devices());
    ASSERT_GT(engine, 0);
    ASSERT_EQ(::kill(engine, SIGKILL), 0);
    expect_all_ok(wait_all(ranks, 90));
  }
}

// Rounds 0 .. most - 1, all enqueued as soon as there is room, and again from where the group says after each
// break. Until all ranks are through, a rank may be asked to redo what its peers have not completed.
void rounds_through_breaks(const Case& c, const Group& group, std::uint32_t rank, std::uint64_t most,
                           Gate& finished) {
  Rounds rounds(group, c, rank, most * 10);
  std::uint64_t epoch = epoch_of(group);
  std::uint64_t next = 0;  // operation
  for (const double end = now_s() + 60;;) {
    RANK_CHECK(now_s() < end, "not through");
    epd_status_t status = next % 2 != 0 ? rounds.try_submit_combine(next++ / 2) : EPD_OK;
    for (; status == EPD_OK && next < 2 * most; next += 2) status = rounds.try_submit(next / 2);
    if (status != EPD_OK) must(status, "a submission", EPD_ENGINE_RESTARTED);
    rounds.must_finish();
    const bool through = rounds.check_those_that_ended_well() && status == EPD_OK;
    if (through) {
      finished.arrive();
    }
    epd_resume_info_t info = EPD_RESUME_INFO_INIT;
    do {
      if (finished.count.load() >= c.num_ranks) return;
      if (through) sleep_ms(2);
      status = epd_group_resume(group.get(), 20000, &info);
      if (finished.count.load() >= c.num_ranks) return;  // others may have left by now
      must(status, "resume");
      RANK_CHECK(now_s() < end, "the others are not through");
    } while (info.epoch == epoch || (through && info.resume_op >= next));
    if (through) finished.count.fetch_sub(1);
    epoch = info.epoch;
    next = info.resume_op;
  }
}

TEST_P(Streams, DISABLED_EnginesThatAreKilledUnderRoundsFarAhead) {
  DaemonOptions options;
  options.prefix = GetParam();
  options.settings = {{"engine.max_restarts_per_minute", "1000"}, {"engine.restart_backoff_max_ms", "20"}};
  Daemon own(options);
  ASSERT_TRUE(own.start());
  const Case c = stream_case(3, 2);
  Shared<Gate> finished;
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const Session session(own.socket(), own.device(rank));
      const Group group(session, c.config("under", rank));
      rounds_through_breaks(c, group, rank, 200, *finished);
      return "";
    });
  }
  for (std::uint32_t kills = 0; kills < 6 && finished->count < c.num_ranks; ++kills) {
    sleep_ms(60 + 17 * static_cast<int>(kills));
    const pid_t engine = own.engine(kills % c.num_ranks % own.devices());
    if (engine > 0) ::kill(engine, SIGKILL);
  }
  expect_all_ok(wait_all(ranks, 90));
  own.stop();
}

TEST_P(Streams, ADaemonThatIsKilledHoldsNoStream) {
  DaemonOptions options;
  options.prefix = GetParam();
  Daemon own(options);
  ASSERT_TRUE(own.start());
  const Case c = stream_case(2, 1);
  Shared<Gate> waiting;
  Shared<Gate> killed;
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      const Session session(own.socket(), own.device(rank));
      const Group group(session, c.config("killed", rank));
      Rounds rounds(group, c, rank, 4);
      for (std::uint64_t i = 0; i < 2; ++i) rounds.submit(i);
      rounds.must_finish();
      rounds.check_all();
      if (rank == 0) {
        for (std::uint64_t i = 2; i < 4; ++i) rounds.submit(i);
        waiting->arrive();
        rounds.must_finish();  // nobody is in the library
        rounds.all_must_fail(EPD_DAEMON_LOST);
      } else {
        waiting->arrive();
        killed->wait_for(1);
      }
      epd_ticket_t ticket = 0;
      const bool lost = eventually(20, [&] {
        const epd_status_t status = epd_noop_on_stream(group.get(), 0, rounds.stream().get(), &ticket);
        return status == EPD_DAEMON_LOST;
      });
      RANK_CHECK(lost, epd_last_error());
      return "";
    });
  }
  ASSERT_TRUE(eventually(60, [&] { return waiting->count == 2; }));
  sleep_ms(50);
  own.signal(SIGKILL);
  killed->open();
  expect_all_ok(wait_all(ranks, 90));
}

}  // namespace
}  // namespace epd::test
