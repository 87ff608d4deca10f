// The engine alone, driven through its link and through hand-written ring slots.

#include "engine_fixture.h"
#include "session_port.h"

#include <gtest/gtest.h>
#include <functional>
#include <map>
#include <set>

namespace epd::test {
namespace {

class EngineTest : public EngineFixture {
 protected:
  // One operation of every rank; returns the completions.
  std::vector<abi::Completion> run(const std::function<abi::Submission(std::uint32_t rank)>& make) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) sessions_[rank]->submit(make(rank));
    std::vector<abi::Completion> all;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto done = sessions_[rank]->wait();
      if (!done) throw std::runtime_error("no completion on rank " + std::to_string(rank));
      all.push_back(*done);
    }
    return all;
  }

  // The answer is the rows themselves.
  std::vector<reference::CombineInput> check_received(std::uint32_t slot,
                                                      const std::vector<reference::RankInput>& inputs,
                                                      const std::vector<abi::Completion>& done) {
    const auto expected = reference::dispatch(params(), inputs);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(done[rank].status, StatusCode::kOk) << group_->board(rank).slots[slot].message;
      EXPECT_EQ(done[rank].num_recv_rows, expected[rank].num_recv_rows);
    }
    check_rows(slot, inputs);
    return answer(slot, inputs);
  }

  // Dispatch, an expert that returns its rows, combine; everything compared with the reference.
  void run_and_check(std::uint32_t slot) {
    const auto inputs = fill(slot);
    const auto done = run([&](std::uint32_t rank) { return dispatch_of(rank, slot, inputs[rank]); });
    const auto answers = check_received(slot, inputs, done);
    combine_and_check(slot, slot, inputs, answers, done[0].op_index);
  }

  abi::Submission dispatch_of(std::uint32_t rank, std::uint32_t slot,
                              const reference::RankInput& input) const {
    abi::Submission s = submission(rank, Op::kDispatch, slot);
    s.num_tokens = input.num_tokens;
    return s;
  }

  // Engine 1 is a new one: the other breaks, and all go on at `next`.
  void resume_after_restart(std::uint64_t next) {
    abi::Break broken{};
    broken.group_id = kGroup;
    broken.epoch = group_->epoch;
    broken.cause = StatusCode::kEngineRestarted;
    engine_view_[0]->send(LinkType::kBreak, broken);
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kBroken).has_value());
    ++group_->epoch;
    for (EngineThread* engine : engine_view_)
      engine->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, next, StatusCode::kOk, -1, {}});
  }

  void combine_and_check(std::uint32_t slot, std::uint32_t route,
                         const std::vector<reference::RankInput>& inputs,
                         const std::vector<reference::CombineInput>& answers, std::uint64_t handle) {
    const auto done = run([&](std::uint32_t rank) {
      abi::Submission s = submission(rank, Op::kCombine, slot);
      s.handle = handle;
      s.route = route;
      return s;
    });
    for (std::uint32_t rank = 0; rank < kRanks; ++rank)
      ASSERT_EQ(done[rank].status, StatusCode::kOk) << group_->board(rank).slots[slot].message;
    check_sums(slot, inputs, answers);
  }
};

TEST_F(EngineTest, DispatchAndCombineMatchTheReference) {
  for (int i = 0; i < 20; ++i) run_and_check(i % kShape.depth);
}

TEST_F(EngineTest, NoopComesBack) {
  const std::uint64_t ticket = sessions_[2]->submit(submission(2, Op::kNoop, 0));
  const auto done = sessions_[2]->wait();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->ticket, ticket);
  EXPECT_EQ(done->status, StatusCode::kOk);
}

// Both found by proto/model/session.pml.
TEST_F(EngineTest, SleepingForRoomIsToldFromSleepingForSubmissions) {
  RawSession& session = *sessions_[2];
  const auto sleeps = [&](abi::Sleep how) {
    for (int i = 0; i < 10'000 && session.b().engine_sleep.sleeping.load() != how; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return session.b().engine_sleep.sleeping.load() == how;
  };
  EXPECT_TRUE(sleeps(abi::kAsleep));
  for (std::size_t i = 0; i <= abi::kCompletionSlots; ++i) {
    while (session.b().submission_head.value.load() + abi::kSubmissionSlots == i) std::this_thread::yield();
    session.submit(submission(2, Op::kNoop, 0));
  }
  EXPECT_TRUE(sleeps(abi::kAsleepForRoom));
  for (std::size_t i = 0; i <= abi::kCompletionSlots; ++i) {
    ASSERT_TRUE(session.wait().has_value());
    if (i == 0) session.ring();
  }
  EXPECT_TRUE(sleeps(abi::kAsleep));
}

TEST_F(EngineTest, NewEngineRingsForWhatTheOldOneMayHavePublished) {
  EXPECT_EQ(engines_[1]->stop(), 0);
  sessions_[1]->a().client_sleep.sleeping = 1;
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  EXPECT_TRUE(sessions_[1]->rung());
}

TEST_F(EngineTest, EachIllegalFieldEndsOnlyItsSession) {
  struct Case {
    const char* word;
    void (*spoil)(abi::Submission&);
  };
  const Case cases[] = {
      {"op is 77", [](abi::Submission& s) { s.op = static_cast<Op>(77); }},
      {"member is 9999", [](abi::Submission& s) { s.member = 9999; }},
      {"slot is 2", [](abi::Submission& s) { s.slot = 2; }},
      {"num_tokens is 10", [](abi::Submission& s) { s.num_tokens = 10; }},
      {"flags is 2147483648", [](abi::Submission& s) { s.flags = 1u << 31; }},
      {"flags is 16", [](abi::Submission& s) { s.flags = abi::kFlagReturnWeights; }},
      {"num_tokens is 1; allowed: 0",
       [](abi::Submission& s) { s.flags = abi::kFlagCached, s.num_tokens = 1; }},
      {"biases in flags is 1",
       [](abi::Submission& s) { s.op = Op::kCombine, s.flags = 1u << abi::kBiasShift; }},
      {"row format in flags is 1; allowed: 0 .. 0",
       [](abi::Submission& s) { s.flags = 1u << abi::kFormatShift; }},
      {"flags is 2048", [](abi::Submission& s) { s.op = Op::kCombine, s.flags = 1u << abi::kFormatShift; }},
      {"route is 2; allowed: 0 .. 1", [](abi::Submission& s) { s.route = 2; }},
      {"route is 1; allowed: the slot", [](abi::Submission& s) { s.route = 1; }},
      {"reserved", [](abi::Submission& s) { s.reserved[13] = 1; }},
      {"epoch is 1000", [](abi::Submission& s) { s.epoch = 1000; }},
  };
  std::uint64_t id = 100;
  for (const Case& c : cases) {
    // A session of its own each time, in a group of one rank.
    RawSession bad(id);
    bad.add_to(*engine_view_[0]);
    abi::GroupShape shape = kShape;
    shape.num_ranks = 1;
    const RawGroup group(id, shape);
    group.add_to_engine({engine_view_[0]}, {&bad}, 0, false);
    abi::Submission s = submission(0, Op::kDispatch, 0);
    c.spoil(s);
    bad.submit(s);
    const auto failed = engine_view_[0]->expect(LinkType::kSessionFailed);
    ASSERT_TRUE(failed.has_value()) << c.word;
    EXPECT_EQ(failed->read<abi::SessionFailed>().value().session_id, id);
    EXPECT_NE(std::string(bad.b().message).find(c.word), std::string::npos) << bad.b().message;
    ++id;
  }
  run_and_check(0);
}

TEST_F(EngineTest, SecondOperationOnABusySlotEndsTheSession) {
  sessions_[0]->submit(submission(0, Op::kDispatch, 1));
  sessions_[0]->submit(submission(0, Op::kDispatch, 1));
  expect_session_ended(0, "slot is 1");
}

TEST_F(EngineTest, BadChoiceIsNamedAndTheGroupGoesOn) {
  group_->region<std::int32_t>(1, 0, Region::kTopkIdx)[3] = 6;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < 3; ++i) group_->region<std::int32_t>(rank, 0, Region::kTopkIdx)[i] = 0;
    abi::Submission s = submission(rank, Op::kDispatch, 0);
    s.num_tokens = 2;
    sessions_[rank]->submit(s);
  }
  const auto request = engine_view_[1]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kInvalidArgument);
  EXPECT_EQ(body.failed_rank, 1);
  EXPECT_NE(std::string(body.text).find("topk_idx[1,1] is 6 on rank 1; allowed: 0 .. 5"), std::string::npos)
      << body.text;
  break_and_resume(body.cause);
  for (auto& session : sessions_) {
    const auto done = session->wait();
    ASSERT_TRUE(done.has_value());
    EXPECT_EQ(done->status, StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(group_->resume_index, 0u);
  run_and_check(0);
}

TEST_F(EngineTest, DifferentSlotsAreNamed) {
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    sessions_[rank]->submit(submission(rank, Op::kDispatch, rank == 2 ? 1 : 0));
  }
  const auto request = engine_view_[0]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  EXPECT_NE(std::string(request->read<abi::Break>().value().text).find("slot is"), std::string::npos);
}

TEST_F(EngineTest, DeadlineNamesTheRankThatIsMissing) {
  abi::Submission s = submission(0, Op::kDispatch, 0);
  s.timeout_ms = 30;
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));
  ASSERT_TRUE(takes_part(1, 0, 0));
  sessions_[0]->submit(s);
  const auto request = engine_view_[0]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.failed_rank, 2);
  break_and_resume(body.cause);
  EXPECT_EQ(sessions_[0]->wait()->status, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(sessions_[1]->wait()->status, StatusCode::kDeadlineExceeded);
  // Rank 2 has not heard of the new epoch: its late submission is refused with the cause.
  abi::Submission late = submission(2, Op::kDispatch, 0);
  late.epoch = 1;
  sessions_[2]->submit(late);
  EXPECT_EQ(sessions_[2]->wait()->status, StatusCode::kDeadlineExceeded);
  run_and_check(1);
}

// Rank 2 comes when the others have announced it.
TEST_F(EngineTest, WaitsAndRowsAreCountedBehindTheBoard) {
  const auto inputs = fill(0);
  for (const std::uint32_t rank : {0u, 1u}) sessions_[rank]->submit(dispatch_of(rank, 0, inputs[rank]));
  for (const std::uint32_t rank : {0u, 1u}) ASSERT_TRUE(takes_part(rank, 0, 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  sessions_[2]->submit(dispatch_of(2, 0, inputs[2]));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto done = sessions_[rank]->wait();
    ASSERT_TRUE(done.has_value());
    const abi::RankWaits waits = group_->waits(rank);
    EXPECT_EQ(waits.counts->operations, 1u);
    EXPECT_EQ(waits.counts->last_arrivals, rank == 2 ? 1u : 0u) << rank;
    EXPECT_EQ(waits.counts->rows, done->num_recv_rows);
    const std::uint64_t for_2 = waits.peers[2].ready_ns;
    if (rank == 2) {
      EXPECT_EQ(waits.peers[0].ready_ns + waits.peers[1].ready_ns, 0u);
    } else {
      EXPECT_GE(for_2, 2'000'000u) << rank;
      EXPECT_LT(waits.peers[1 - rank].ready_ns, for_2);
    }
  }
  run_and_check(1);
  EXPECT_EQ(group_->waits(0).counts->operations, 3u) << "combines too";
}

TEST_F(EngineTest, BusyIsTheTimeWithAnOperationInFlight) {
  const Mapping map =
      Mapping::map(engines_[0]->page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  const auto& page = *map.as<const abi::EnginePage>();
  const auto later = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return page.busy_ns.load();
  };
  EXPECT_EQ(later(), 0u);
  const auto inputs = fill(0);
  sessions_[0]->submit(dispatch_of(0, 0, inputs[0]));  // and waits for the others
  ASSERT_TRUE(takes_part(0, 0, 2));
  // An engine that waits sleeps for a second at most, and counts when it wakes up.
  for (int i = 0; i < 100 && page.busy_ns < 50'000'000; ++i) later();
  EXPECT_GE(page.busy_ns, 50'000'000u);
  for (const std::uint32_t rank : {1u, 2u}) sessions_[rank]->submit(dispatch_of(rank, 0, inputs[rank]));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(sessions_[rank]->wait().has_value());
  std::uint64_t idle = later();  // the round of the last answer is counted at its end
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t next = later();
    if (next == idle) break;
    idle = next;
  }
  EXPECT_EQ(later(), idle);
}

TEST_F(EngineTest, LostRankFailsWhatItNeverSubmitted) {
  sessions_[0]->submit(submission(0, Op::kDispatch, 0));
  engine_view_[1]->send(LinkType::kStopMember, abi::MemberRef{kGroup, 1, 0, 0});
  const auto stopped = engine_view_[1]->expect(LinkType::kMemberStopped);
  ASSERT_TRUE(stopped.has_value());
  EXPECT_EQ(stopped->read<abi::MemberRef>().value().next_submit, 0u);
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));  // too late: it waits for the verdict
  abi::Break lost{};
  lost.group_id = kGroup;
  lost.epoch = group_->epoch;
  lost.fatal = 1;
  lost.cause = StatusCode::kRankLost;
  lost.failed_rank = 1;
  for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, lost);
  for (EngineThread* engine : engine_view_) EXPECT_TRUE(engine->expect(LinkType::kBroken).has_value());
  const auto done = sessions_[0]->wait();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, StatusCode::kRankLost);
  EXPECT_EQ(done->failed_rank, 1);
  const auto late = sessions_[1]->wait();
  ASSERT_TRUE(late.has_value());
  EXPECT_EQ(late->status, StatusCode::kRankLost);
  sessions_[2]->submit(submission(2, Op::kDispatch, 0));
  EXPECT_EQ(sessions_[2]->wait()->status, StatusCode::kRankLost);
  engine_view_[1]->send(LinkType::kRemoveSession, abi::SessionRef{sessions_[1]->id()});
  EXPECT_TRUE(engine_view_[1]->expect(LinkType::kSessionRemoved).has_value());
  for (EngineThread* engine : engine_view_) {
    engine->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
    EXPECT_TRUE(engine->expect(LinkType::kGroupRemoved).has_value());
  }
}

TEST_F(EngineTest, NewEngineAnswersForTheOldOneAndGoesOn) {
  run_and_check(0);
  run_and_check(1);
  sessions_[0]->submit(submission(0, Op::kDispatch, 0));
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));
  // Until both engines have taken theirs.
  for (std::uint32_t rank : {0u, 1u}) {
    while (sessions_[rank]->b().submission_head.value.load() < 5) std::this_thread::yield();
  }
  EXPECT_EQ(engines_[1]->stop(), 0);
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  abi::Break broken{};
  broken.group_id = kGroup;
  broken.epoch = group_->epoch;
  broken.cause = StatusCode::kEngineRestarted;
  engine_view_[0]->send(LinkType::kBreak, broken);
  const auto ack = engine_view_[0]->expect(LinkType::kBroken);
  ASSERT_TRUE(ack.has_value());
  EXPECT_EQ(ack->read<abi::Broken>().value().next_index, 4u);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  EXPECT_EQ(group_->board(1).next_index.load(), 4u);
  ++group_->epoch;
  for (EngineThread* engine : engine_view_)
    engine->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, 4, StatusCode::kOk, -1, {}});
  EXPECT_EQ(sessions_[0]->wait()->status, StatusCode::kEngineRestarted);
  EXPECT_EQ(sessions_[1]->wait()->status, StatusCode::kEngineRestarted);
  run_and_check(0);
}

// The messages of a group's start come in several rounds. What lies in the ring meanwhile waits for all of
// them: it would run in the epoch that is over.
TEST_F(EngineTest, NothingIsTakenForAGroupBeforeItsCommit) {
  run_and_check(0);
  EXPECT_EQ(engines_[1]->stop(), 0);
  const std::uint64_t head = sessions_[1]->b().submission_head.value.load();
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  group_->begin(engine_view_, session_view_, 1, true);
  // An answer says that what came before has been read.
  engine_view_[1]->send(LinkType::kRemoveSession, abi::SessionRef{4711});
  ASSERT_TRUE(engine_view_[1]->expect(LinkType::kSessionRemoved).has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(sessions_[1]->b().submission_head.value.load(), head);
  group_->commit(*engine_view_[1]);
  ASSERT_TRUE(engine_view_[1]->expect(LinkType::kGroupReady).has_value());
  resume_after_restart(2);
  const auto done = sessions_[1]->wait();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, StatusCode::kEngineRestarted);
  run_and_check(0);
}

// What a former engine left in flight waits for its group's resume, however long that takes, and the new
// engine sleeps.
TEST_F(EngineTest, AnEngineThatWaitsForAResumeSleeps) {
  run_and_check(0);
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));
  while (sessions_[1]->b().submission_head.value.load() < 3) std::this_thread::yield();
  EXPECT_EQ(engines_[1]->stop(), 0);
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  engine_view_[1]->send(LinkType::kAllTold, abi::AllTold{});
  const Mapping map =
      Mapping::map(engines_[1]->page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  const auto& page = *map.as<const abi::EnginePage>();
  const std::uint64_t before = page.sleeps.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  EXPECT_LT(page.sleeps.load() - before, 100u) << "it does not sleep";
  resume_after_restart(2);
  EXPECT_EQ(sessions_[1]->wait()->status, StatusCode::kEngineRestarted);
  run_and_check(0);
}

// It showed what the device has by itself, until it woke from its next sleep.
TEST(EngineSettings, ThePageShowedOldSmsUntilTheEngineTurnedAgain) {
  EngineThread engine(0);
  const Mapping map = Mapping::map(engine.page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::uint32_t sms = 1 + i % 2;
    engine.start();
    engine.send(LinkType::kSettings, abi::Settings{sms, 5000, 0, 20, "info"});
    ASSERT_EQ(engine.stop(), 0);
    EXPECT_EQ(map.as<const abi::EnginePage>()->sms.load(), sms);
  }
}

// The former engine died between "every rank has completed this" and the completion.
TEST_F(EngineTest, WhatEveryRankCompletedSucceedsThoughItsEngineDiedBeforeItSaidSo) {
  run_and_check(0);
  const std::uint64_t tail = sessions_[1]->b().completion_tail.value.load();
  engines_[1]->stop();
  // Operation 2, a dispatch with 5 rows, is done; operation 3 is not.
  abi::Board& board = group_->board(1);
  board.next_index = 3;
  board.slots[1].num_recv_rows = 5;
  board.slots[1].counts_ticket = 70;
  sessions_[1]->b().inflight[0] = {70, 2, 0, RawGroup::member(1), 1, 1, 0};
  sessions_[1]->b().inflight[1] = {71, 3, 0, RawGroup::member(1), 0, 0, 0};
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  // What comes while the group breaks fails with it, and leaves the rank's place as it was.
  sessions_[1]->submit(submission(1, Op::kDispatch, 0));
  abi::Break again{};
  again.group_id = kGroup;
  again.epoch = group_->epoch;
  again.cause = StatusCode::kEngineRestarted;
  engine_view_[1]->send(LinkType::kBreak, again);
  const auto ack = engine_view_[1]->expect(LinkType::kBroken);
  ASSERT_TRUE(ack.has_value());
  EXPECT_EQ(ack->read<abi::Broken>().value().next_index, 3u);
  ++group_->epoch;
  engine_view_[1]->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, 3, StatusCode::kOk, -1, {}});
  std::map<std::uint64_t, abi::Completion> done;
  for (int i = 0; i < 3; ++i) {
    const auto completion = sessions_[1]->wait();
    ASSERT_TRUE(completion.has_value());
    done[completion->ticket] = *completion;
  }
  EXPECT_EQ(sessions_[1]->b().completion_tail.value.load(), tail + 3);
  EXPECT_EQ(done[70].status, StatusCode::kOk);
  EXPECT_EQ(done[70].op_index, 2u);
  EXPECT_EQ(done[70].num_recv_rows, 5u);
  EXPECT_EQ(done[71].status, StatusCode::kEngineRestarted);
  EXPECT_EQ(done.rbegin()->second.status, StatusCode::kEngineRestarted);
}

// The former engine died between recording an operation and giving its slot of the ring back, with as many in
// flight as there may be: the next one looks at the ring only when it has answered some.
TEST_F(EngineTest, WhatWasRecordedAndIsStillInTheRingIsAnsweredOnce) {
  run_and_check(0);
  RawSession& session = *sessions_[1];
  engines_[1]->stop();
  std::multiset<std::uint64_t> recorded;
  for (std::uint32_t i = 0; i + 1 < abi::kSubmissionSlots; ++i) {
    session.b().inflight[i] = {1000 + i, engine::kUnnumbered, 0, RawGroup::member(1), i % kShape.depth, 0, 0};
    recorded.insert(1000 + i);
  }
  const std::uint64_t last = session.submit(submission(1, Op::kDispatch, 0));
  session.b().inflight[abi::kSubmissionSlots - 1] = {last, 2, 0, RawGroup::member(1), 0, 0, 0};
  recorded.insert(last);
  engines_[1]->start();
  session.add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  ++group_->epoch;
  engine_view_[1]->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, 2, StatusCode::kOk, -1, {}});
  std::multiset<std::uint64_t> answered;
  while (answered.size() < recorded.size()) {
    const auto completion = session.wait();
    ASSERT_TRUE(completion.has_value());
    EXPECT_EQ(completion->status, StatusCode::kEngineRestarted);
    answered.insert(completion->ticket);
  }
  EXPECT_EQ(answered, recorded);
  const std::uint64_t noop = session.submit(submission(1, Op::kNoop, 0));
  const auto next = session.wait();
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->ticket, noop);
}

TEST_F(EngineTest, RoutingOutlivesTheEngine) {
  const auto inputs = fill(0);
  const auto dispatched = run([&](std::uint32_t rank) { return dispatch_of(rank, 0, inputs[rank]); });
  const auto answers = check_received(0, inputs, dispatched);
  engines_[1]->stop();
  engines_[1]->start();
  sessions_[1]->add_to(*engine_view_[1]);
  abi::Break broken{};
  broken.group_id = kGroup;
  broken.epoch = group_->epoch;
  broken.cause = StatusCode::kEngineRestarted;
  engine_view_[0]->send(LinkType::kBreak, broken);
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kBroken).has_value());
  group_->resume_index = 1;
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  ++group_->epoch;
  for (EngineThread* engine : engine_view_)
    engine->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, 1, StatusCode::kOk, -1, {}});
  // Until both have the new epoch.
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    while (group_->board(rank).epoch.load() != group_->epoch) std::this_thread::yield();
  }
  combine_and_check(0, 0, inputs, answers, 0);
}

TEST_F(EngineTest, CachedDispatchUsesTheRoutingOfAnother) {
  auto inputs = fill(0);
  const auto first = run([&](std::uint32_t rank) { return dispatch_of(rank, 0, inputs[rank]); });
  check_received(0, inputs, first);
  // Other rows on the other slot, whose choices are nonsense that nobody may read.
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    auto* x = group_->region<std::uint8_t>(rank, 1, Region::kX);
    for (std::uint8_t& byte : inputs[rank].x) byte = static_cast<std::uint8_t>(random_() & 0x3f);
    std::copy(inputs[rank].x.begin(), inputs[rank].x.end(), x);
    for (int i = 0; i < 18; ++i) group_->region<std::int32_t>(rank, 1, Region::kTopkIdx)[i] = 99;
  }
  const auto again = run([&](std::uint32_t rank) {
    abi::Submission s = submission(rank, Op::kDispatch, 1);
    s.flags = abi::kFlagCached;
    s.handle = first[rank].op_index;
    s.route = 0;
    return s;
  });
  const auto answers = check_received(1, inputs, again);
  combine_and_check(1, 0, inputs, answers, first[0].op_index);
}

TEST_F(EngineTest, ANewDispatchOnARecordLeavesTheOperationThatUsesItAlone) {
  const auto inputs = fill(0);
  const auto first = run([&](std::uint32_t rank) { return dispatch_of(rank, 0, inputs[rank]); });
  const auto answers = check_received(0, inputs, first);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    std::copy(answers[rank].y.begin(), answers[rank].y.end(),
              group_->region<std::uint16_t>(rank, 1, Region::kY));
  }
  const auto others = fill(0);
  // The combine of slot 1 waits for rank 2 while the ranks' dispatches already renew record 0.
  const auto submit_combine = [&](std::uint32_t rank) {
    abi::Submission s = submission(rank, Op::kCombine, 1);
    s.handle = first[0].op_index;
    s.route = 0;
    sessions_[rank]->submit(s);
  };
  for (std::uint32_t rank : {0u, 1u}) {
    submit_combine(rank);
    sessions_[rank]->submit(dispatch_of(rank, 0, others[rank]));
  }
  submit_combine(2);
  sessions_[2]->submit(dispatch_of(2, 0, others[2]));
  const auto expected = reference::combine(params(), inputs, answers, {});
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < 2; ++i) ASSERT_EQ(sessions_[rank]->wait()->status, StatusCode::kOk);
    const auto* out = group_->region<std::uint16_t>(rank, 1, Region::kOut);
    EXPECT_TRUE(std::equal(expected[rank].out.begin(), expected[rank].out.end(), out)) << "rank " << rank;
  }
}

TEST_F(EngineTest, StaleRoutingIsNamedAndTheGroupGoesOn) {
  for (int i = 0; i < 3; ++i) run_and_check(0);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    sessions_[rank]->submit(submission(rank, Op::kCombine, 0));  // of dispatch 0, which dispatch 4 replaced
  }
  const auto request = engine_view_[0]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kNotFound);
  EXPECT_NE(std::string(body.text).find("routing of dispatch 0"), std::string::npos) << body.text;
  break_and_resume(body.cause);
  for (auto& session : sessions_) EXPECT_EQ(session->wait()->status, StatusCode::kNotFound);
  run_and_check(1);
}

TEST_F(EngineTest, MoreRowsThanRoomIsNamedOnEveryRank) {
  RawSession session(300);
  session.add_to(*engine_view_[0]);
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.max_recv_rows = 4;
  const RawGroup group(300, shape);
  group.add_to_engine({engine_view_[0]}, {&session}, 0, false);
  abi::Submission s = submission(0, Op::kDispatch, 0);
  s.num_tokens = 5;
  session.submit(s);
  const auto request = engine_view_[0]->expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(body.text).find("rank 0 would receive 5 rows; allowed: max_recv_rows = 4"),
            std::string::npos)
      << body.text;
}

// Tags begin anew beyond 2^39 operations; see also engine_wraps_test.cpp, for GPUs.
class EngineNearWrapTest : public EngineTest {
 protected:
  EngineNearWrapTest() { first_op_ = 2 * abi::kTagRound - 3; }
};

// B7: from 2^40 - 1 on tags were less than those before, and no operation ever got its own.
TEST_F(EngineNearWrapTest, OperationsAndRoutingsGoOn) {
  for (int i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(1);
  const auto done = run([&](std::uint32_t rank) { return dispatch_of(rank, 1, inputs[rank]); });
  const auto answers = check_received(1, inputs, done);
  ASSERT_EQ(in_tags(done[0].op_index), abi::kTagRound + 3);
  break_and_resume(StatusCode::kEngineRestarted);
  ASSERT_FALSE(HasFatalFailure());
  ASSERT_EQ(in_tags(done[0].op_index), 3u);
  combine_and_check(1, 1, inputs, answers, done[0].op_index);
  ASSERT_EQ(engines_[1]->stop(), 0);
  break_without_engine_1();
  ASSERT_FALSE(HasFatalFailure());
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  group_->resume_index = group_->board(1).next_index.load();
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  combine_and_check(1, 1, inputs, answers, done[0].op_index);
  for (int i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
}

// An epoch that has lasted for so many operations is ended before its tags are at an end.
TEST_F(EngineNearWrapTest, AnEpochWhoseNumbersRunOutIsBroken) {
  std::optional<Packet> request;
  std::uint64_t last = 0;
  while (!request && last < first_op_ + 2 * (abi::kTagRenewal - abi::kTagRound)) {
    const auto inputs = fill(0);
    const auto done = run([&](std::uint32_t rank) { return dispatch_of(rank, 0, inputs[rank]); });
    ASSERT_EQ(done[0].status, StatusCode::kOk);
    last = done[0].op_index;
    if (in_tags(last) >= abi::kTagRenewal - 1) request = engine_of(0).expect(LinkType::kBreakRequest);
  }
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kAborted);
  EXPECT_NE(std::string(body.text).find("epoch 1 has no numbers left after 1027 operations"),
            std::string::npos)
      << body.text;
  break_and_resume(body.cause);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_LT(in_tags(last + 1), abi::kTagRound);
  for (int i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
}

}  // namespace
}  // namespace epd::test
