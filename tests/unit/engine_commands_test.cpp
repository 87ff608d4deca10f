// Commands: engines with kernels that stay, on the fake driver. The test rings as the client's kernels do.

#include "engine_harness.h"
#include "kernels/cuda.h"
#include "kernels/numbers.h"
#include "kernels/reference.h"
#include "proto/commands.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <random>

namespace epd::test {
namespace {

using abi::LinkType;
using abi::Op;
using abi::Region;
namespace reference = kernels::reference;

constexpr abi::GroupShape kShape{
    3, 6, 9, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, abi::LossPolicy::kFailFast};
constexpr std::uint64_t kGroup = 7;
constexpr std::uint32_t kRanks = 3;

// Programs, on each slot one.
constexpr std::uint32_t dispatch_on(std::uint32_t slot) {
  return slot;
}
constexpr std::uint32_t combine_on(std::uint32_t slot) {
  return 10 + slot;
}
constexpr std::uint32_t kNoopProgram = 63;

template <typename Condition>
bool comes(Condition condition, int timeout_ms = 10'000) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// What the client's kernels do for one rank.
class Ringer {
 public:
  explicit Ringer(abi::CommandWords& words) : words_(words) {}

  // Returns the number.
  std::uint32_t ring(std::uint32_t program, std::uint32_t num_tokens, std::uint64_t epoch,
                     bool flagged = false) {
    const std::uint32_t number = words_.tail++;
    if (flagged) words_.flags[program] = 0;
    std::atomic_ref(words_.commands[number % abi::kCommandSlots])
        .store(abi::pack({number, num_tokens, program, flagged, static_cast<std::uint32_t>(epoch & 0xff)}),
               std::memory_order_release);
    return number;
  }
  bool ended(std::uint32_t number, int timeout_ms = 10'000) {
    return comes([&] { return static_cast<std::int32_t>(done() - number) > 0; }, timeout_ms);
  }
  std::uint32_t done() { return std::atomic_ref(words_.done).load(std::memory_order_acquire); }
  std::uint32_t failed() { return std::atomic_ref(words_.failed).load(); }

 private:
  abi::CommandWords& words_;
};

class EngineCommandsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::uint32_t i = 0; i < 2; ++i) {
      engines_.push_back(std::make_unique<EngineThread>(i, "cuda"));
      engines_.back()->start();
      engine_view_.push_back(engines_.back().get());
    }
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions_.push_back(std::make_unique<RawSession>(10 + rank));
      sessions_.back()->add_to(*engine_view_[rank % 2]);
      session_view_.push_back(sessions_.back().get());
    }
    group_ = std::make_unique<RawGroup>(kGroup, kShape, "cuda", 2);
    group_->commands = commands_;
    group_->add_to(engine_view_, session_view_);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ringers_.emplace_back(group_->words(rank));
    record_all();
  }

  void TearDown() override {
    engines_.clear();  // before the memory
  }

  bool by_stream(std::uint32_t rank) const { return commands_[rank] != 0; }
  RawSession& session(std::uint32_t rank) { return *sessions_[rank]; }
  EngineThread& engine_of(std::uint32_t rank) { return *engine_view_[rank % 2]; }

  abi::Submission submission(std::uint32_t rank, Op op, std::uint32_t slot) const {
    abi::Submission s{};
    s.op = op;
    s.member = RawGroup::member(rank);
    s.slot = slot;
    s.route = slot;
    s.epoch = group_->epoch;
    return s;
  }
  abi::Submission program(std::uint32_t rank, Op op, std::uint32_t slot, std::uint32_t number) const {
    abi::Submission s = submission(rank, op, slot);
    s.flags = abi::kFlagRecord;
    s.handle = number;
    return s;
  }
  StatusCode record(std::uint32_t rank, Op op, std::uint32_t slot, std::uint32_t number) {
    session(rank).submit(program(rank, op, slot, number));
    const auto done = session(rank).wait();
    return done ? done->status : StatusCode::kInternal;
  }
  void record_all() {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      if (!by_stream(rank)) continue;
      for (std::uint32_t slot = 0; slot < kShape.depth; ++slot) {
        ASSERT_EQ(record(rank, Op::kDispatch, slot, dispatch_on(slot)), StatusCode::kOk);
        ASSERT_EQ(record(rank, Op::kCombine, slot, combine_on(slot)), StatusCode::kOk);
      }
      ASSERT_EQ(record(rank, Op::kNoop, 0, kNoopProgram), StatusCode::kOk);
    }
  }

  // Random routing and rows in every rank's slot; the inputs as the reference takes them.
  std::vector<reference::RankInput> fill(std::uint32_t slot) {
    std::vector<reference::RankInput> inputs(kRanks);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      auto& input = inputs[rank];
      input.num_tokens = random_() % (kShape.max_tokens + 1);
      std::vector<std::uint16_t> x;
      for (std::uint32_t i = 0; i < input.num_tokens * kShape.hidden; ++i) {
        x.push_back(
            kernels::float_to_bf16(static_cast<float>(static_cast<int>(random_() % 2001) - 1000) / 64));
      }
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(x.data());
      input.x.assign(bytes, bytes + x.size() * 2);
      for (std::uint32_t i = 0; i < input.num_tokens * kShape.topk; ++i) {
        input.topk_idx.push_back(static_cast<std::int64_t>(random_() % (kShape.num_experts + 1)) - 1);
        group_->region<std::int32_t>(rank, slot, Region::kTopkIdx)[i] =
            static_cast<std::int32_t>(input.topk_idx.back());
      }
      std::copy(input.x.begin(), input.x.end(), group_->region<std::uint8_t>(rank, slot, Region::kX));
    }
    return inputs;
  }

  static reference::GroupParams params() {
    reference::GroupParams params;
    params.num_ranks = kRanks;
    params.num_experts = kShape.num_experts;
    params.hidden = kShape.hidden;
    params.topk = kShape.topk;
    return params;
  }

  // One operation of every rank that is there, by whatever it uses. A combine that is submitted uses the
  // routing of the operation before, or of `routing`.
  void run(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
           std::optional<std::uint64_t> routing = {}) {
    std::vector<std::uint32_t> numbers(kRanks);
    for (const std::uint32_t rank : there_) {
      const std::uint32_t n = op == Op::kDispatch ? inputs[rank].num_tokens : 0;
      if (by_stream(rank)) {
        const std::uint32_t which = op == Op::kDispatch ? dispatch_on(slot) : combine_on(slot);
        numbers[rank] = ringers_[rank].ring(which, n, group_->epoch);
      } else {
        abi::Submission s = submission(rank, op, slot);
        s.num_tokens = n;
        if (op == Op::kCombine) s.handle = routing.value_or(next_ - 1);
        session(rank).submit(s);
      }
    }
    for (const std::uint32_t rank : there_) {
      if (by_stream(rank)) {
        ASSERT_TRUE(ringers_[rank].ended(numbers[rank], 3000)) << "rank " << rank << state();
      } else {
        const auto done = session(rank).wait();
        ASSERT_TRUE(done.has_value());
        ASSERT_EQ(done->status, StatusCode::kOk) << group_->board(rank).slots[slot].message;
        ASSERT_EQ(done->op_index, next_);
      }
    }
    ++next_;
  }

  std::string state() {
    std::string text;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      text += "; rank " + std::to_string(rank) + ": ended " + std::to_string(ringers_[rank].done()) + " of " +
              std::to_string(group_->words(rank).tail) + ", failed " +
              std::to_string(ringers_[rank].failed()) + ", next operation " +
              std::to_string(group_->board(rank).next_index.load());
    }
    return text;
  }

  void run_and_check(std::uint32_t slot) {
    const auto inputs = fill(slot);
    run(Op::kDispatch, slot, inputs);
    if (HasFatalFailure()) return;
    const auto expected = reference::dispatch(params(), inputs);
    std::vector<reference::CombineInput> answers(kRanks);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto* rows = group_->region<std::uint8_t>(rank, slot, Region::kRecvX);
      EXPECT_TRUE(std::equal(expected[rank].recv_x.begin(), expected[rank].recv_x.end(), rows)) << rank;
      auto* y = group_->region<std::uint16_t>(rank, slot, Region::kY);
      std::copy_n(rows, expected[rank].recv_x.size(), reinterpret_cast<std::uint8_t*>(y));
      answers[rank].y.assign(y, y + expected[rank].recv_x.size() / 2);
    }
    run(Op::kCombine, slot, inputs);
    if (HasFatalFailure()) return;
    const auto combined = reference::combine(params(), inputs, answers, {});
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto* out = group_->region<std::uint16_t>(rank, slot, Region::kOut);
      EXPECT_TRUE(std::equal(combined[rank].out.begin(), combined[rank].out.end(), out)) << "rank " << rank;
    }
  }

  // Breaks the group recoverably and resumes it, as the supervisor would.
  void break_and_resume(StatusCode cause) {
    break_all(cause);
    if (!HasFatalFailure()) resume_all();
  }
  void break_all(StatusCode cause) {
    abi::Break message{};
    message.group_id = kGroup;
    message.epoch = group_->epoch;
    message.cause = cause;
    message.culprit_rank = 1;
    abi::set_text(message.text, "test", 4);
    std::uint64_t resume = ~std::uint64_t{0};
    for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
    for (EngineThread* engine : engine_view_) {
      const auto broken = engine->expect(LinkType::kBroken);
      ASSERT_TRUE(broken.has_value());
      resume = std::min(resume, broken->read<abi::Broken>().value().next_index);
    }
    next_ = group_->resume_index = resume;
  }
  void resume_all() {
    ++group_->epoch;
    for (EngineThread* engine : engine_view_) {
      engine->send(LinkType::kResume,
                   abi::Resume{kGroup, group_->epoch, group_->resume_index, StatusCode::kOk, -1, {}});
    }
    for (EngineThread* engine : engine_view_) ASSERT_TRUE(engine->expect(LinkType::kResumed).has_value());
  }

  // The group, and what is below `fail_from` may be completed.
  void lose(std::uint64_t fail_from) {
    abi::Break message{};
    message.group_id = kGroup;
    message.epoch = group_->epoch;
    message.fail_from = fail_from;
    message.fatal = 1;
    message.cause = StatusCode::kRankLost;
    message.culprit_rank = 1;
    for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
    for (EngineThread* engine : engine_view_)
      ASSERT_TRUE(engine->expect(LinkType::kBroken, 5000).has_value()) << state();
  }
  static Mapping map_page(const EngineThread& engine) {
    return Mapping::map(engine.page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  }
  static std::uint64_t kernel_stops(const abi::EnginePage& page) {
    const auto& buckets = page.kernel_stops.buckets;
    return std::accumulate(std::begin(buckets), std::end(buckets), std::uint64_t{0});
  }
  bool is_closed(std::uint32_t rank) {
    abi::CommandWords& words = group_->words(rank);
    return comes([&] {
      return std::atomic_ref(words.closed).load() == 1 &&
             std::all_of(std::begin(words.flags), std::end(words.flags),
                         [](std::uint32_t& flag) { return std::atomic_ref(flag).load() == 1; });
    });
  }
  void expect_session_ended(std::uint32_t rank, const std::string& word) {
    const auto failed = engine_of(rank).expect(LinkType::kSessionFailed);
    ASSERT_TRUE(failed.has_value()) << word;
    EXPECT_EQ(failed->read<abi::SessionFailed>().value().session_id, session(rank).id());
    EXPECT_NE(std::string(session(rank).b().message).find(word), std::string::npos)
        << session(rank).b().message;
  }

  std::mt19937 random_{std::random_device{}()};
  std::vector<std::uint32_t> commands_{1, 1, 0};  // rank 2 submits: all ranks see the same operations
  std::vector<std::unique_ptr<EngineThread>> engines_;
  std::vector<EngineThread*> engine_view_;
  std::vector<std::unique_ptr<RawSession>> sessions_;
  std::vector<RawSession*> session_view_;
  std::unique_ptr<RawGroup> group_;
  std::vector<Ringer> ringers_;
  std::vector<std::uint32_t> there_{0, 1, 2};  // ranks
  std::uint64_t next_ = 0;                     // operation
};

TEST_F(EngineCommandsTest, CommandsAndSubmissionsOfOneGroupMatchTheReference) {
  for (std::uint32_t i = 0; i < 100; ++i) {
    run_and_check(i % kShape.depth);
    if (HasFatalFailure()) return;
  }
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ringers_[rank].failed(), 0u);
    EXPECT_TRUE(comes([&] { return group_->board(rank).next_index.load() == next_; }))
        << group_->board(rank).next_index.load();
  }
}

TEST_F(EngineCommandsTest, NoopsEndAndHaveNoNumber) {
  for (int i = 0; i < 200; ++i) {
    const bool flagged = random_() % 2 != 0;
    const std::uint32_t number = ringers_[0].ring(kNoopProgram, 0, group_->epoch, flagged);
    ASSERT_TRUE(ringers_[0].ended(number));
    EXPECT_TRUE(!flagged || group_->words(0).flags[kNoopProgram] == 1);
  }
  run_and_check(1);
}

// The journal's 1024 entries come round more than twice.
TEST_F(EngineCommandsTest, TheJournalIsReadAsItFills) {
  for (std::uint32_t i = 0; i < 2500; ++i) {
    const std::uint32_t number = ringers_[1].ring(kNoopProgram, 0, group_->epoch);
    ASSERT_TRUE(i % 32 != 31 || ringers_[1].ended(number)) << i;
  }
  run_and_check(0);
}

TEST_F(EngineCommandsTest, ABadChoiceBreaksTheGroupAndCommandsAreDiscardedUntilItResumes) {
  run_and_check(0);
  const auto inputs = fill(1);
  group_->region<std::int32_t>(1, 1, Region::kTopkIdx)[0] = 6;
  const std::uint32_t bad = ringers_[1].ring(dispatch_on(1), 1, group_->epoch);
  ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  session(2).submit(submission(2, Op::kDispatch, 1));
  const auto request = engine_of(1).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kInvalidArgument);
  EXPECT_EQ(body.culprit_rank, 1);
  EXPECT_NE(std::string(body.text).find("operation 2: topk_idx[0,0] is 6 on rank 1"), std::string::npos)
      << body.text;
  EXPECT_TRUE(ringers_[1].ended(bad));
  const std::uint32_t after = ringers_[1].ring(combine_on(1), 0, group_->epoch);
  EXPECT_TRUE(ringers_[1].ended(after)) << "streams go on";
  EXPECT_EQ(ringers_[1].failed(), 2u);
  break_and_resume(body.cause);
  EXPECT_EQ(session(2).wait()->status, StatusCode::kInvalidArgument);
  EXPECT_EQ(next_, 2u);
  // Of an epoch that has gone.
  const std::uint32_t late = ringers_[0].ring(dispatch_on(0), 0, group_->epoch - 1);
  EXPECT_TRUE(ringers_[0].ended(late));
  EXPECT_EQ(ringers_[0].failed(), 2u);
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
}

// The routing of the last dispatch outlives a break: a combine of the new epoch uses it.
TEST_F(EngineCommandsTest, RoutingsOutliveABreak) {
  for (std::uint32_t i = 0; i < 5; ++i) run_and_check(i % kShape.depth);
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  std::vector<reference::CombineInput> answers(kRanks);
  const auto expected = reference::dispatch(params(), inputs);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    auto* y = group_->region<std::uint16_t>(rank, 0, Region::kY);
    std::copy_n(expected[rank].recv_x.data(), expected[rank].recv_x.size(),
                reinterpret_cast<std::uint8_t*>(y));
    answers[rank].y.assign(y, y + expected[rank].recv_x.size() / 2);
  }
  const std::uint32_t alone = ringers_[0].ring(combine_on(0), 0, group_->epoch);  // nobody else comes
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  break_and_resume(StatusCode::kEngineRestarted);
  EXPECT_TRUE(ringers_[0].ended(alone));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  run(Op::kCombine, 0, inputs);
  const auto combined = reference::combine(params(), inputs, answers, {});
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto* out = group_->region<std::uint16_t>(rank, 0, Region::kOut);
    EXPECT_TRUE(std::equal(combined[rank].out.begin(), combined[rank].out.end(), out)) << "rank " << rank;
  }
  run_and_check(1);
}

TEST_F(EngineCommandsTest, ACombineWithoutARoutingNamesTheRecord) {
  ringers_[0].ring(combine_on(1), 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kNotFound);
  EXPECT_NE(std::string(body.text).find("the routing in record 1 of rank 0, which holds none"),
            std::string::npos)
      << body.text;
  break_and_resume(body.cause);
  run_and_check(1);
}

TEST_F(EngineCommandsTest, TheDeadlineNamesTheRankThatIsMissing) {
  abi::Submission s = program(0, Op::kDispatch, 0, 40);
  s.timeout_ms = 50;
  session(0).submit(s);
  ASSERT_EQ(session(0).wait()->status, StatusCode::kOk);
  ringers_[0].ring(40, 0, group_->epoch);
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(body.culprit_rank, 2);
  EXPECT_NE(std::string(body.text).find("ended after 50 ms"), std::string::npos) << body.text;
  break_and_resume(body.cause);
  run_and_check(0);
}

TEST_F(EngineCommandsTest, APrograMayBeRecordedAgainButNotOtherwise) {
  EXPECT_EQ(record(0, Op::kDispatch, 1, dispatch_on(1)), StatusCode::kOk);
  run_and_check(1);
  session(0).submit(program(0, Op::kCombine, 1, dispatch_on(1)));
  expect_session_ended(0, "handle is 1, a program that was recorded otherwise");
}

TEST_F(EngineCommandsTest, ProgramsAreNumberedBelowTheirMost) {
  session(1).submit(program(1, Op::kDispatch, 1, 64));
  expect_session_ended(1, "handle is 64; allowed: 0 .. 63");
}

TEST_F(EngineCommandsTest, WhoRingsSubmitsNothingElse) {
  session(0).submit(submission(0, Op::kNoop, 0));
  EXPECT_EQ(session(0).wait()->status, StatusCode::kOk);
  session(0).submit(submission(0, Op::kDispatch, 0));
  expect_session_ended(0, "flags is 0; allowed: with kFlagRecord");
}

TEST_F(EngineCommandsTest, WhoSubmitsRecordsNothing) {
  session(2).submit(program(2, Op::kDispatch, 0, 0));
  expect_session_ended(2, "flags is 512; allowed: without kFlagRecord");
}

TEST_F(EngineCommandsTest, IllegalCommandsEndTheSession) {
  ringers_[0].ring(30, 0, group_->epoch);
  expect_session_ended(0, "program is 30; allowed: one that was recorded");
  ringers_[1].ring(dispatch_on(0), kShape.max_tokens + 1, group_->epoch);
  expect_session_ended(1, "num_tokens is 10; allowed: 0 .. 9");
}

// A kernel that gives SMs away must end its command first, which waits for a peer.
TEST_F(EngineCommandsTest, AnotherRankComesWhileACommandWaits) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  RawGroup beside(8, shape, "cuda", 1);
  beside.priority = 3;
  beside.add_to_engine({engine_view_[0]}, {&other}, 0, false);
  abi::Submission noop = submission(0, Op::kNoop, 0);
  session(0).submit(noop);
  EXPECT_EQ(session(0).wait()->status, StatusCode::kOk) << "the loop is not blocked";
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
  abi::Submission s = submission(2, Op::kDispatch, 0);
  s.num_tokens = inputs[2].num_tokens;
  session(2).submit(s);
  EXPECT_TRUE(ringers_[0].ended(waits));
  EXPECT_TRUE(ringers_[1].ended(last));
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  next_ = 1;
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
  for (const std::int32_t priority : {7, -8}) {  // and shares change once more
    engine_view_[0]->send(LinkType::kGroupSettings, abi::GroupSettings{kGroup, 0, priority});
    for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
  }
  engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved).has_value());
  for (std::uint32_t i = 0; i < 10; ++i) run_and_check(i % kShape.depth);
}

TEST_F(EngineCommandsTest, AStoppedRankHasSubmittedWhatItHasCompleted) {
  run_and_check(0);
  ringers_[0].ring(dispatch_on(1), 0, group_->epoch);  // waits for the others
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine_of(0).send(LinkType::kStopMember, abi::MemberRef{kGroup, 0, 0, 0});
  const auto stopped = engine_of(0).expect(LinkType::kMemberStopped);
  ASSERT_TRUE(stopped.has_value());
  EXPECT_EQ(stopped->read<abi::MemberRef>().value().next_submit, 2u);
}

TEST_F(EngineCommandsTest, NobodyWaitsForAGroupThatIsGone) {
  ringers_[0].ring(dispatch_on(0), 0, group_->epoch);
  for (EngineThread* engine : engine_view_) engine->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
  for (EngineThread* engine : engine_view_) ASSERT_TRUE(engine->expect(LinkType::kGroupRemoved).has_value());
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(is_closed(rank));
}

// Rank 2 is lost, and then another comes in its place: rows of the older routing that are there add nothing.
TEST_F(EngineCommandsTest, AnOlderRoutingOutlivesTheLossOfARankAndItsReplacement) {
  const auto inputs = fill(0);
  run(Op::kDispatch, 0, inputs);
  const auto expected = reference::dispatch(params(), inputs);
  std::vector<reference::CombineInput> answers(kRanks);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    auto* y = group_->region<std::uint16_t>(rank, 0, Region::kY);
    std::copy_n(expected[rank].recv_x.data(), expected[rank].recv_x.size(),
                reinterpret_cast<std::uint8_t*>(y));
    answers[rank].y.assign(y, y + expected[rank].recv_x.size() / 2);
  }
  answers[2].y.assign(answers[2].y.size(), 0);
  const auto combined = reference::combine(params(), inputs, answers, {});
  const auto combine = [&] {
    run(Op::kCombine, 0, inputs, 0);
    for (const std::uint32_t rank : {0u, 1u}) {
      auto* out = group_->region<std::uint16_t>(rank, 0, Region::kOut);
      EXPECT_TRUE(std::equal(combined[rank].out.begin(), combined[rank].out.end(), out)) << "rank " << rank;
      std::fill_n(out, combined[rank].out.size(), std::uint16_t{0x7fc0});
    }
  };
  break_all(StatusCode::kRankLost);
  for (EngineThread* engine : engine_view_) group_->mask_rank(*engine, 2);
  there_ = {0, 1};
  resume_all();
  combine();
  break_all(StatusCode::kAborted);
  group_->replace(2, group_->epoch + 1);
  for (std::uint32_t engine = 0; engine < 2; ++engine)
    group_->tell_rank(engine_view_, session_view_, engine, 2);
  there_ = {0, 1, 2};
  resume_all();
  ASSERT_FALSE(HasFatalFailure());
  combine();
  ASSERT_FALSE(HasFatalFailure());
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(1);

  abi::Submission again = program(0, Op::kDispatch, 0, 20);
  again.flags |= abi::kFlagCached;
  session(0).submit(again);
  ASSERT_EQ(session(0).wait()->status, StatusCode::kOk);
  const std::uint32_t refused = ringers_[0].ring(20, 0, group_->epoch);
  const auto request = engine_of(0).expect(LinkType::kBreakRequest);
  ASSERT_TRUE(request.has_value());
  const auto body = request->read<abi::Break>().value();
  EXPECT_EQ(body.cause, StatusCode::kNotFound);
  const std::string text(body.text);
  for (const char* part : {"the routing in record 0 of rank 0 is of epoch 1", "lost or joined in epoch 3"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_TRUE(ringers_[0].ended(refused));
  break_and_resume(body.cause);
  run_and_check(0);
}

// What every rank has begun is completed, though nothing tells so when the group is lost.
TEST_F(EngineCommandsTest, ALostGroupCompletesWhatAllHaveBegun) {
  run_and_check(0);
  const auto inputs = fill(1);
  abi::Submission s = submission(2, Op::kDispatch, 1);
  s.num_tokens = inputs[2].num_tokens;
  const std::uint64_t taken = session(2).b().submission_head.value.load();
  session(2).submit(s);
  ASSERT_TRUE(comes([&] { return session(2).b().submission_head.value.load() > taken; }));
  const std::uint32_t first = ringers_[0].ring(dispatch_on(1), inputs[0].num_tokens, group_->epoch);
  const std::uint32_t second = ringers_[1].ring(dispatch_on(1), inputs[1].num_tokens, group_->epoch);
  lose(3);
  EXPECT_TRUE(ringers_[0].ended(first));
  EXPECT_TRUE(ringers_[1].ended(second));
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ringers_[rank].failed(), 0u);
    EXPECT_EQ(group_->board(rank).next_index.load(), 3u);
    EXPECT_TRUE(is_closed(rank));
  }
}

// More than anybody can complete: commands end all the same, and soon.
TEST_F(EngineCommandsTest, ALostGroupDoesNotWaitForWhoDoesNotCome) {
  run_and_check(0);
  const std::uint32_t alone = ringers_[0].ring(dispatch_on(1), 0, group_->epoch);
  lose(5);
  EXPECT_TRUE(ringers_[0].ended(alone));
  EXPECT_EQ(ringers_[0].failed(), 1u);
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(group_->board(rank).next_index.load(), 2u);
    EXPECT_TRUE(is_closed(rank));
  }
}

// A later command lies where the next one was.
TEST_F(EngineCommandsTest, ACommandThatWasOverwrittenEndsTheSession) {
  run_and_check(0);
  abi::CommandWords& words = group_->words(1);
  const std::uint32_t next = words.tail;
  words.tail += abi::kCommandSlots;
  const std::uint32_t late = ringers_[1].ring(dispatch_on(0), 0, group_->epoch);
  expect_session_ended(
      1, "number is " + std::to_string(late) + "; allowed: " + std::to_string(next) + ", since");
  EXPECT_TRUE(ringers_[1].ended(late));
  EXPECT_EQ(ringers_[1].failed(), abi::kCommandSlots + 1);
}

// Its last signals came with the break.
TEST_F(EngineCommandsTest, AnAbortedCommandThatEveryRankCompletedCounts) {
  const auto inputs = fill(0);
  const std::uint32_t aborted = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  const abi::ExchangeArenaLayout layout(kShape);
  const Mapping exchange = group_->map_exchange(0);
  std::byte* const block = exchange.bytes() + layout.block(0, kShape.depth);
  ASSERT_TRUE(comes([&] {
    return reinterpret_cast<abi::SignalLine*>(block + layout.ready)->tag.load() == abi::op_tag(1, 0);
  }));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    reinterpret_cast<abi::SignalLine*>(block + layout.arrived)[rank].tag.store(abi::op_tag(1, 0));
  break_all(StatusCode::kRankLost);
  EXPECT_TRUE(ringers_[0].ended(aborted));
  EXPECT_EQ(group_->board(0).next_index.load(), 1u);
  EXPECT_EQ(group_->board(1).next_index.load(), 0u);
  bool found = false;
  for (std::uint64_t half = 0; half < 2; ++half) {
    const std::byte* const at = exchange.bytes() + layout.routing_of(0) + layout.half_bytes * half;
    const auto& head = *reinterpret_cast<const kernels::cuda::RouteHead*>(at);
    found |= head.handle == 1 && head.epoch == 1 && head.num_tokens == inputs[0].num_tokens;
  }
  EXPECT_TRUE(found) << "its routing stands";
}

// As one whose rank rejoins when nobody else of the group was on its device. A kernel looks at the words of
// its rank's arena all the time.
TEST_F(EngineCommandsTest, ARankThatIsToldOfAgainKeepsItsMemory) {
  run_and_check(0);
  for (int i = 0; i < 3; ++i) {
    break_all(StatusCode::kAborted);
    for (const std::uint32_t rank : {0u, 1u, 2u})
      group_->tell_rank(engine_view_, session_view_, rank % 2, rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    resume_all();
    ASSERT_FALSE(HasFatalFailure());
    run_and_check(i % kShape.depth);
  }
}

// Its kernel has no SMs yet when it goes.
TEST_F(EngineCommandsTest, ARankGoesBeforeAnotherHasMadeRoom) {
  const auto inputs = fill(0);
  const std::uint32_t waits = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  abi::Submission s = submission(2, Op::kDispatch, 0);  // the engine's other rank waits, too
  s.num_tokens = inputs[2].num_tokens;
  session(2).submit(s);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  RawSession other(50);
  other.add_to(*engine_view_[0]);
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 2;
  for (const std::uint32_t commands : {0u, 1u, 1u}) {
    RawGroup beside(8, shape, "cuda", 1);
    beside.commands = {commands};
    beside.announce({engine_view_[0]}, {&other}, 0, false);
    engine_view_[0]->send(LinkType::kRemoveGroup, abi::GroupRef{8});
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kGroupRemoved, 2000).has_value());
    EXPECT_TRUE(commands == 0 || comes([&] { return beside.words(0).closed == 1; }));
  }
  session(0).submit(submission(0, Op::kNoop, 0));
  EXPECT_TRUE(session(0).wait(2000).has_value()) << "the loop is blocked";
  EXPECT_FALSE(ringers_[0].ended(waits, 0));
  const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
  EXPECT_TRUE(ringers_[0].ended(waits));
  EXPECT_TRUE(ringers_[1].ended(last));
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  next_ = 1;
  for (std::uint32_t i = 0; i < 4; ++i) run_and_check(i % kShape.depth);
}

// Told amid a command, a kernel ends that first.
TEST_F(EngineCommandsTest, HowLongKernelsTookToStopIsCounted) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  const auto stops = [&] { return kernel_stops(page); };
  run_and_check(0);
  for (std::uint32_t i = 0; i < 10; ++i) {
    const std::uint64_t before = stops();
    engines_[0]->send(LinkType::kSettings, abi::Settings{16 + 2 * (i % 2), 5000, 20, 2});
    run_and_check(i % kShape.depth);
    EXPECT_TRUE(comes([&] { return stops() >= before + 2; })) << "of both ranks, " << stops() - before;
  }
  constexpr std::chrono::milliseconds kWait{200};
  const auto inputs = fill(0);
  const std::uint32_t first = ringers_[0].ring(dispatch_on(0), inputs[0].num_tokens, group_->epoch);
  std::this_thread::sleep_for(kWait);
  engines_[0]->send(LinkType::kSettings, abi::Settings{16, 5000, 20, 2});
  std::this_thread::sleep_for(kWait);
  const std::uint64_t before = stops();
  const std::uint32_t last = ringers_[1].ring(dispatch_on(0), inputs[1].num_tokens, group_->epoch);
  abi::Submission s = submission(2, Op::kDispatch, 0);
  s.num_tokens = inputs[2].num_tokens;
  session(2).submit(s);
  EXPECT_TRUE(ringers_[0].ended(first));
  EXPECT_TRUE(ringers_[1].ended(last));
  EXPECT_EQ(session(2).wait()->status, StatusCode::kOk);
  EXPECT_TRUE(comes([&] { return stops() > before; }));
  EXPECT_GE(page.kernel_stop_max_us.load(), 100'000u) << "the command's wait counts";
}

// A client that submits ahead always has something in flight.
TEST_F(EngineCommandsTest, SmsChangeThoughSomethingIsAlwaysInFlight) {
  const Mapping map = map_page(*engines_[0]);
  const auto& page = *map.as<const abi::EnginePage>();
  std::array<std::uint32_t, 2> sms{16, 24};
  for (std::uint32_t i = 0; i < 20; ++i) {
    run_and_check(i % kShape.depth);
    std::vector<std::vector<reference::RankInput>> inputs;
    const auto submit = [&](std::uint32_t slot) {
      inputs.push_back(fill(slot));
      abi::Submission s = submission(2, Op::kDispatch, slot);
      s.num_tokens = inputs.back()[2].num_tokens;
      session(2).submit(s);
    };
    const auto others_come = [&](std::uint32_t slot) {
      for (const std::uint32_t rank : {0u, 1u})
        ringers_[rank].ring(dispatch_on(slot), inputs[slot][rank].num_tokens, group_->epoch);
      ++next_;
      return session(2).wait();
    };
    const auto in_flight = [&](std::ptrdiff_t wanted) {
      return comes([&] {
        return wanted == std::count_if(std::begin(page.ops), std::end(page.ops), [](const abi::OpView& op) {
                 return op.ticket.load() != 0 &&
                        op.stage.load() > static_cast<std::uint32_t>(abi::OpStage::kPlanning);
               });
      });
    };
    submit(0);
    EXPECT_TRUE(in_flight(1));
    const std::uint64_t before = kernel_stops(page);
    engines_[0]->send(LinkType::kSettings, abi::Settings{sms[i % 2], 5000, 20, 2});
    EXPECT_TRUE(comes([&] { return kernel_stops(page) == before + 1; })) << "rank 0's had nothing to end";
    submit(1);
    EXPECT_TRUE(in_flight(2));
    EXPECT_EQ(others_come(0)->status, StatusCode::kOk);
    EXPECT_TRUE(comes([&] { return kernel_stops(page) == before + 2; })) << "rank 2's";
    EXPECT_TRUE(in_flight(1));
    EXPECT_EQ(others_come(1)->status, StatusCode::kOk);
  }
}

TEST_F(EngineCommandsTest, AnotherEngineGoesOnWhereTheRingStands) {
  for (std::uint32_t i = 0; i < 3; ++i) run_and_check(i % kShape.depth);
  EXPECT_EQ(engines_[1]->stop(), 0);
  ringers_[1].ring(dispatch_on(0), 0, group_->epoch);  // nobody is there
  abi::Break message{};
  message.group_id = kGroup;
  message.epoch = group_->epoch;
  message.cause = StatusCode::kEngineRestarted;
  engine_view_[0]->send(LinkType::kBreak, message);
  ASSERT_TRUE(engine_view_[0]->expect(LinkType::kBroken).has_value());
  engines_[1]->start();
  session(1).add_to(*engine_view_[1]);
  group_->add_to_engine(engine_view_, session_view_, 1, true);
  group_->resume_index = next_;
  ++group_->epoch;
  for (EngineThread* engine : engine_view_) {
    engine->send(LinkType::kResume, abi::Resume{kGroup, group_->epoch, next_, StatusCode::kOk, -1, {}});
    ASSERT_TRUE(engine->expect(LinkType::kResumed).has_value());
  }
  EXPECT_TRUE(comes([&] { return ringers_[1].failed() == 1; }));
  record_all();
  for (std::uint32_t i = 0; i < 5; ++i) run_and_check(i % kShape.depth);
}

// Devices without a kernel that stays. The supervisor refuses such a join before.
class EngineWithoutCommands : public ::testing::TestWithParam<const char*> {};

TEST_P(EngineWithoutCommands, SaysSo) {
  EngineThread engine(0, GetParam(), false);
  engine.start();
  RawSession session(10);
  session.add_to(engine);
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  RawGroup group(9, shape, GetParam());
  group.commands = {1};
  group.announce({&engine}, {&session}, 0, false);
  const auto ready = engine.expect(LinkType::kGroupReady);
  ASSERT_TRUE(ready.has_value());
  const auto body = ready->read<abi::GroupReady>().value();
  EXPECT_EQ(body.status, StatusCode::kUnsupported);
  const std::string text(body.text);
  for (const std::string part : {"commands is 1 (by stream) on ", GetParam(), "devices.mode", "\"resident\""})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  engine.send(LinkType::kRemoveGroup, abi::GroupRef{9});
  EXPECT_TRUE(engine.expect(LinkType::kGroupRemoved).has_value());
  EXPECT_EQ(engine.stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, EngineWithoutCommands, ::testing::Values("host", "cuda"));

}  // namespace
}  // namespace epd::test
