// A group of three ranks on two engines without a supervisor, and its operations against the reference: on
// GPUs of the fake driver, with pairs of kernels ahead, where streams of ranks 0 and 1 make calls (unless a
// test wants others) and of rank 2 its host; or on host devices. All see the same operations.
#pragma once

#include "engine_harness.h"
#include "kernels/numbers.h"
#include "kernels/reference.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <atomic>
#include <iterator>
#include <random>

namespace epd::test {

using abi::LinkType;
using abi::Op;
using abi::Region;
namespace reference = kernels::reference;

inline constexpr abi::GroupShape kShape{
    3, 6, 9, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, abi::LossPolicy::kFailFast};
inline constexpr std::uint64_t kGroup = 7;
inline constexpr std::uint32_t kRanks = 3;
inline constexpr std::uint32_t kNoopFlag = abi::flag_of(Op::kNoop, 0);

// Rank r is on engine r % 2.
class EngineFixture : public ::testing::Test {
 protected:
  // `by_stream`: of each rank on a GPU, whether a stream makes its calls, or the host.
  explicit EngineFixture(std::string kind = "cuda", std::vector<std::uint32_t> by_stream = {1, 1, 0})
      : kind_(std::move(kind)), by_stream_(std::move(by_stream)) {
    if (on_host()) by_stream_.assign(kRanks, 0);
  }

  void SetUp() override {
    for (std::uint32_t i = 0; i < 2; ++i) {
      engines_.push_back(std::make_unique<EngineThread>(i, kind_));
      engines_.back()->start();
      engine_view_.push_back(engines_.back().get());
    }
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions_.push_back(std::make_unique<RawSession>(10 + rank));
      sessions_.back()->add_to(engine_of(rank));
      session_view_.push_back(sessions_.back().get());
    }
    group_ = std::make_unique<RawGroup>(kGroup, kShape, kind_, 2);
    group_->resume_index = next_ = first_op_;
    group_->add_to(engine_view_, session_view_);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ringers_.push_back(new_ringer(rank));
  }
  void TearDown() override {
    engines_.clear();  // before the memory
  }

  bool on_host() const { return kind_ == "host"; }
  RawSession& session(std::uint32_t rank) { return *sessions_[rank]; }
  EngineThread& engine_of(std::uint32_t rank) { return *engine_view_[rank % 2]; }

  Ringer new_ringer(std::uint32_t rank) const {
    return {group_->words(rank), group_->results(rank), !by_stream(rank),
            on_host() ? sessions_[rank].get() : nullptr};
  }
  bool by_stream(std::uint32_t rank) const { return by_stream_[rank] != 0; }
  std::uint32_t ring(std::uint32_t rank, const abi::Call& call, std::uint32_t num_tokens = 0) {
    return ringers_[rank].ring(call, num_tokens, group_->epoch);
  }
  // It was carried out.
  bool ends_well(std::uint32_t rank, std::uint32_t number) { return ringers_[rank].ends_well(number); }

  // One operation of every rank that is there.
  void run(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs) {
    await_ends(ask(call_on(op, slot), inputs));
  }
  // Returns the numbers of calls.
  std::vector<std::uint32_t> ask(const abi::Call& call, const std::vector<reference::RankInput>& inputs) {
    std::vector<std::uint32_t> numbers(kRanks);
    const bool counts = abi::makes_routing(call.op, call.flags);
    for (const std::uint32_t rank : there_)
      numbers[rank] = ring(rank, call, counts ? inputs[rank].num_tokens : 0);
    return numbers;
  }
  void await_ends(const std::vector<std::uint32_t>& numbers) {
    for (const std::uint32_t rank : there_) {
      ASSERT_TRUE(ringers_[rank].ended(numbers[rank])) << "rank " << rank << state();
      const abi::CallEnd end = ringers_[rank].end(numbers[rank]);
      ASSERT_EQ(end.ending, abi::CallEnding::kCarriedOut)
          << "rank " << rank << state() << ": " << group_->board(rank).message;
      ASSERT_EQ(end.index, next_);
    }
    ++next_;
  }

  std::string state() {
    std::string text;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      text += "; rank " + std::to_string(rank) + ": ended " + std::to_string(ringers_[rank].done()) + " of " +
              std::to_string(ringers_[rank].tail()) + ", failed " + std::to_string(ringers_[rank].failed()) +
              ", next operation " + std::to_string(group_->board(rank).next_index.load());
    }
    return text;
  }

  void run_and_check(std::uint32_t slot) {
    const auto inputs = fill(slot);
    run(Op::kDispatch, slot, inputs);
    if (HasFatalFailure()) return;
    check_rows(slot, inputs);
    const auto answers = answer(slot, inputs);
    run(Op::kCombine, slot, inputs);
    if (!HasFatalFailure()) check_sums(slot, inputs, answers);
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

  // The rows that a dispatch of `inputs` delivers, as if an expert had put them into y unchanged.
  std::vector<reference::CombineInput> answer(std::uint32_t slot,
                                              const std::vector<reference::RankInput>& inputs) {
    const auto expected = reference::dispatch(params(), inputs);
    std::vector<reference::CombineInput> answers(kRanks);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      auto* y = group_->region<std::uint16_t>(rank, slot, Region::kY);
      std::copy_n(expected[rank].recv_x.data(), expected[rank].recv_x.size(),
                  reinterpret_cast<std::uint8_t*>(y));
      answers[rank].y.assign(y, y + expected[rank].recv_x.size() / 2);
    }
    return answers;
  }
  // Checks the rows that were delivered.
  void check_rows(std::uint32_t slot, const std::vector<reference::RankInput>& inputs) {
    const auto expected = reference::dispatch(params(), inputs);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto* rows = group_->region<std::uint8_t>(rank, slot, Region::kRecvX);
      EXPECT_TRUE(std::equal(expected[rank].recv_x.begin(), expected[rank].recv_x.end(), rows))
          << "rank " << rank;
    }
  }
  void check_sums(std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
                  const std::vector<reference::CombineInput>& answers) {
    const auto expected = reference::combine(params(), inputs, answers, {});
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const auto* out = group_->region<std::uint16_t>(rank, slot, Region::kOut);
      EXPECT_TRUE(std::equal(expected[rank].out.begin(), expected[rank].out.end(), out)) << "rank " << rank;
    }
  }

  void expect_session_ended(std::uint32_t rank, const std::string& word) {
    const auto failed = engine_of(rank).expect(LinkType::kSessionFailed);
    ASSERT_TRUE(failed.has_value()) << word;
    const auto body = failed->read<abi::SessionFailed>().value();
    EXPECT_EQ(body.session_id, session(rank).id());
    EXPECT_NE(std::string(body.text).find(word), std::string::npos) << body.text;
    EXPECT_EQ(session(rank).b().state.load(), static_cast<std::uint32_t>(abi::SessionState::kEnded));
    EXPECT_NE(std::string(session(rank).b().message).find(word), std::string::npos)
        << session(rank).b().message;
  }

  // The number in tags of this epoch.
  std::uint64_t in_tags(std::uint64_t index) const { return index - abi::tag_base(group_->resume_index); }

  // Waits until `rank` has told `peer`, which may be itself, that it takes part in an operation of this
  // epoch.
  bool takes_part(std::uint32_t rank, std::uint64_t index, std::uint32_t peer, int timeout_ms = 10'000) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(peer);
    auto* const lines = reinterpret_cast<abi::SignalLine*>(
        exchange.bytes() + layout.block(in_tags(index), kShape.depth) + layout.ready);
    return comes(
        [&] { return std::atomic_ref(lines[rank].tag).load() == abi::op_tag(group_->epoch, in_tags(index)); },
        timeout_ms);
  }

  // Breaks the group recoverably, and resumes it, as the supervisor would.
  void break_and_resume(StatusCode cause) {
    break_all(cause);
    if (!HasFatalFailure()) resume_all();
  }
  void break_all(StatusCode cause) {
    abi::Break message{};
    message.group_id = kGroup;
    message.epoch = group_->epoch;
    message.cause = cause;
    message.failed_rank = 1;
    abi::set_text(message.text, "test", 4);
    std::uint64_t resume = ~std::uint64_t{0};
    for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
    for (EngineThread* engine : engine_view_) {
      const auto broken = engine->expect(LinkType::kBroken);
      ASSERT_TRUE(broken.has_value());
      resume = std::min(resume, broken->read<abi::Broken>().value().next_index);
    }
    group_->resume_index = next_ = resume;
  }
  // Engine 1 is away: the other one alone is told.
  void break_without_engine_1() {
    abi::Break message{};
    message.group_id = kGroup;
    message.epoch = group_->epoch;
    message.cause = StatusCode::kEngineRestarted;
    engine_view_[0]->send(LinkType::kBreak, message);
    ASSERT_TRUE(engine_view_[0]->expect(LinkType::kBroken).has_value());
  }

  void resume_all() {
    ++group_->epoch;
    for (EngineThread* engine : engine_view_) {
      engine->send(LinkType::kResume,
                   abi::Resume{kGroup, group_->epoch, group_->resume_index, StatusCode::kOk, -1, {}});
    }
    for (EngineThread* engine : engine_view_) ASSERT_TRUE(engine->expect(LinkType::kResumed).has_value());
  }

  // Whether rank `at` was told that the rank has called an operation, or has not.
  bool tells_call(std::uint32_t rank, std::uint64_t index, std::uint32_t at, bool called = true) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(at);
    auto* const lines = reinterpret_cast<abi::SignalLine*>(
        exchange.bytes() + layout.block(in_tags(index), kShape.depth) + layout.called);
    const std::uint64_t tag = abi::op_tag(group_->epoch, in_tags(index));
    return comes([&] { return (std::atomic_ref(lines[rank].tag).load() == tag) == called; });
  }
  // Whether the rank begins an operation that others have not called yet. Those of its device say that they
  // have.
  bool begins_alone(std::uint32_t rank, std::uint64_t index) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(rank);
    auto* const called = reinterpret_cast<abi::SignalLine*>(
        exchange.bytes() + layout.block(in_tags(index), kShape.depth) + layout.called);
    for (std::uint32_t each = 0; each < kRanks; ++each)
      std::atomic_ref(called[each].tag).store(abi::op_tag(group_->epoch, in_tags(index)));
    std::atomic_ref(group_->words(rank).bell[0]).store(1);  // as the last of them does
    return takes_part(rank, index, rank);
  }
  // Operation `index`, which waits for others, of the rank: they say that they have done their part in it.
  void all_arrive_at(std::uint32_t rank, std::uint64_t index) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(rank);
    std::byte* const block = exchange.bytes() + layout.block(in_tags(index), kShape.depth);
    const std::uint64_t tag = abi::op_tag(group_->epoch, in_tags(index));
    const auto lines = [&](std::uint64_t offset) {
      return reinterpret_cast<abi::SignalLine*>(block + offset);
    };
    ASSERT_TRUE(begins_alone(rank, index));
    for (std::uint32_t each = 0; each < kRanks; ++each)
      std::atomic_ref(lines(layout.arrived)[each].tag).store(tag);
  }

  // Starts the engine after it has been stopped. All continue from where its rank's board says: the others
  // have come as far.
  void start_engine_1_again() {
    break_without_engine_1();
    ASSERT_FALSE(HasFatalFailure());
    engines_[1]->start();
    session(1).add_to(*engine_view_[1]);
    group_->add_to_engine(engine_view_, session_view_, 1, true);
    next_ = group_->board(1).next_index.load();
    group_->resume_index = next_;
    resume_all();
  }

  // The group, and what is below `fail_from` may be completed.
  void lose(std::uint64_t fail_from) {
    abi::Break message{};
    message.group_id = kGroup;
    message.epoch = group_->epoch;
    message.fail_from = fail_from;
    message.fatal = 1;
    message.cause = StatusCode::kRankLost;
    message.failed_rank = 1;
    for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
    for (EngineThread* engine : engine_view_)
      ASSERT_TRUE(engine->expect(LinkType::kBroken).has_value()) << state();
  }
  static Mapping map_page(const EngineThread& engine) {
    return Mapping::map(engine.page().get(), sizeof(abi::EnginePage), Access::kReadOnly).value();
  }
  // No stream waits on a host device.
  bool is_closed(std::uint32_t rank) {
    if (on_host()) return true;
    abi::CallWords& words = group_->words(rank);
    return comes([&] {
      return std::atomic_ref(words.closed).load() == 1 &&
             std::all_of(std::begin(words.flags), std::end(words.flags),
                         [](std::uint32_t& flag) { return std::atomic_ref(flag).load() == 1; });
    });
  }

  // The text of the next break that rank's engine asks for, which is for that cause.
  std::string break_asked(std::uint32_t rank, StatusCode cause, std::int32_t failed_rank) {
    const auto request = engine_of(rank).expect(LinkType::kBreakRequest);
    if (!request) return "no request";
    const auto body = request->read<abi::Break>().value();
    EXPECT_EQ(body.cause, cause);
    EXPECT_EQ(body.failed_rank, failed_rank);
    return body.text;
  }

  std::mt19937 random_{std::random_device{}()};
  std::uint64_t first_op_ = 0;  // with which the group begins
  std::vector<std::unique_ptr<EngineThread>> engines_;
  std::vector<EngineThread*> engine_view_;
  std::vector<std::unique_ptr<RawSession>> sessions_;
  std::vector<RawSession*> session_view_;
  std::unique_ptr<RawGroup> group_;
  std::vector<Ringer> ringers_;
  std::vector<std::uint32_t> there_{0, 1, 2};  // ranks
  std::uint64_t next_ = 0;                     // operation

 private:
  const std::string kind_;
  std::vector<std::uint32_t> by_stream_;
};

// Tests of these hold on devices of each kind.
class EngineOfEachKind : public EngineFixture, public ::testing::WithParamInterface<const char*> {
 protected:
  EngineOfEachKind() : EngineFixture(GetParam()) {}
};
inline auto kinds() {
#if defined(EPD_TEST_FAKE_CUDA)
  return ::testing::Values("host", "cuda");
#else
  return ::testing::Values("host");
#endif
}
inline std::string kind_name(const ::testing::TestParamInfo<const char*>& info) {
  return info.param;
}

}  // namespace epd::test
