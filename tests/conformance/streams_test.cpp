// Operations in streams of the application's: rounds that are enqueued far ahead of what has run.
#include "stream_rounds.h"

#include <sstream>

namespace epd::test {
namespace {

class Streams : public StreamConformance {};
EPD_INSTANTIATE_STREAMS(Streams);

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
      enqueued->meet(c.num_ranks);
      rounds.stream().unblock();
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

// As `epctl devices` shows them: "16", "16*" if an operator has set them.
std::string shown_sms(const Daemon& daemon, const std::string& device) {
  std::istringstream text(daemon.epctl({"devices"}).out);
  for (std::string line; std::getline(text, line);) {
    std::string name;
    std::string state;
    std::string pid;
    std::string sms;
    std::istringstream(line) >> name >> state >> pid >> sms;
    if (name == device) return sms;
  }
  return "";
}

// All ranks but one always have something in flight when the SMs change.
TEST_P(Streams, RoundsGoOnWhileSmsChange) {
  constexpr std::uint32_t kChanges = 6;
  constexpr std::uint64_t kBetween = 4;
  constexpr std::uint64_t kRounds = kBetween * kChanges;
  const Case c = stream_case(4, 2);
  Shared<Gate> asked;
  Shared<Gate> changed;
  RankProcess changer([&]() -> std::string {
    for (std::uint32_t i = 0; i < kChanges; ++i) {
      asked->wait_for(i + 1);
      const std::string sms = i % 2 == 0 ? "sms=16" : "sms=32";  // and at last as it was
      for (std::uint32_t device = 0; device < daemon().devices(); ++device) {
        const CommandResult set = daemon().epctl({"set", "device", daemon().device(device), sms});
        RANK_CHECK(set.exit_code == 0, set.err);
      }
      changed->arrive();
    }
    return "";
  });
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rounds rounds(group, c, rank, kRounds);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
      rounds.submit(i);
      if (rank != 0 || i % kBetween != 0) continue;
      asked->arrive();
      changed->wait_for(static_cast<std::uint32_t>(i / kBetween) + 1);
    }
    rounds.must_finish();
    rounds.check_all();
  });
  const RankOutcome outcome = changer.wait(60);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  const std::string device = daemon().device(0);
  for (const std::string sms : {"16", "32"}) {  // with nothing in flight it is as asked for
    EXPECT_EQ(daemon().epctl({"set", "device", device, "sms=" + sms}).exit_code, 0);
    EXPECT_TRUE(eventually(10, [&] { return shown_sms(daemon(), device) == sms + "*"; }))
        << shown_sms(daemon(), device);
  }
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
    held.stream().unblock();
    held.must_finish();
    held.check_all();
  });
}

// ---- the other ways to begin and to wait -------------------------------------------------------

TEST_P(Streams, WithDeferReceiveAStreamWaitsWhenToldTo) {
  Case c = stream_case(2, 2);
  c.sizes = Sizes::kFull;
  Shared<Gate> begun;
  Shared<Gate> ended;
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
    epd_ticket_t ticket = 0;
    must(epd_dispatch(group.get(), &args, stream.get(), &ticket, nullptr), "dispatch");
    RANK_CHECK(stream.finish(kStreamSeconds), "nobody told it to wait");
    must(epd_ticket_wait_on_stream(group.get(), ticket, receiver.get()), "wait on a stream");
    receiver.copy_out(copy, group.slot_on_gpu(0), bytes);
    if (rank == 0) {
      RANK_CHECK(!receiver.idle(), "rank 1 has sent nothing");
      begun->arrive();
    }
    RANK_CHECK(receiver.finish(kStreamSeconds), "the dispatch has ended");
    epd_result_t result;
    epd_result_init(&result);
    must(epd_ticket_wait_sent(group.get(), ticket, kWaitMs), "wait_sent");
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, &result), "dispatch");
    const std::string text =
        check_dispatch(c, group.buffers_in(copy), make_inputs(c, 0), rank, result, nullptr);
    RANK_CHECK(text.empty(), text);
    ended->meet(c.num_ranks);
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

// Rounds of one rank with noops on the same slots and stream. Nobody leaves before all are done: a noop needs
// no peer, but does not come after one that has left.
void rounds_and_noops(const Case& c, const Group& group, std::uint32_t rank, bool ahead, Gate& finished) {
  Rounds rounds(group, c, rank, 8);
  std::vector<epd_ticket_t> noops;
  const auto noop = [&](std::uint32_t slot) {
    epd_ticket_t ticket = 0;
    must(when_there_is_room([&] { return epd_noop(group.get(), slot, rounds.stream().get(), &ticket); }),
         "noop");
    noops.push_back(ticket);
  };
  rounds.stream().hold();
  noop(0);
  RANK_CHECK(!rounds.stream().idle(), "it is held");
  if (!ahead) rounds.stream().unblock();
  for (std::uint64_t i = 0; i < 8; ++i) {
    rounds.submit(i);
    if (!ahead) rounds.must_finish();
    noop(i % 2);
  }
  rounds.stream().unblock();
  for (std::uint32_t i = 0; i < 200; ++i) noop(i % 2);
  rounds.must_finish();
  rounds.check_all();
  for (const epd_ticket_t ticket : noops)
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "noop");
  finished.meet(c.num_ranks);
}

TEST_P(Streams, NoopsComeInTheirTurn) {
  const Case c = stream_case(1, 2);
  Shared<Gate> finished;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    rounds_and_noops(c, group, rank, false, *finished);
  });
}

// A noop that overtook operations which wait for a place in the lane would never get ready, nor they.
TEST_P(Streams, NoopsBetweenRoundsFarAhead) {
  const Case c = stream_case(1, 2);
  Shared<Gate> finished;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    rounds_and_noops(c, group, rank, true, *finished);
  });
}

}  // namespace
}  // namespace epd::test
