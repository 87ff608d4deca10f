// A group of three ranks on two engines without a supervisor, and its operations against the reference.
#pragma once

#include "base/clock.h"
#include "engine_harness.h"
#include "kernels/numbers.h"
#include "kernels/reference.h"

#include <gtest/gtest.h>
#include <algorithm>
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

// Rank r is on engine r % 2.
class EngineFixture : public ::testing::Test {
 protected:
  // `by_stream`: of each rank, whether a stream makes its calls, or the host.
  explicit EngineFixture(std::string kind = "host", std::vector<std::uint32_t> by_stream = {})
      : by_stream_(std::move(by_stream)), kind_(std::move(kind)) {}

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
    group_->calls = calls();
    group_->resume_index = first_op_;
    group_->add_to(engine_view_, session_view_);
  }

  // Whether operations are calls; else ranks submit.
  bool calls() const { return kind_ == "cuda"; }
  RawSession& session(std::uint32_t rank) { return *sessions_[rank]; }
  EngineThread& engine_of(std::uint32_t rank) { return *engine_view_[rank % 2]; }

  abi::Submission submission(std::uint32_t rank, Op op, std::uint32_t slot) const {
    abi::Submission s{};
    s.op = op;
    s.member = RawGroup::member(rank);
    s.slot = slot;
    s.route = slot;
    s.epoch = group_->epoch;
    s.submit_ns = MonotonicClock().now_ns();
    return s;
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
  // What was delivered.
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

  // Of this epoch.
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
    group_->resume_index = resume;
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

  std::mt19937 random_{std::random_device{}()};
  std::vector<std::uint32_t> by_stream_;
  std::uint64_t first_op_ = 0;  // with which the group begins
  std::vector<std::unique_ptr<EngineThread>> engines_;
  std::vector<EngineThread*> engine_view_;
  std::vector<std::unique_ptr<RawSession>> sessions_;
  std::vector<RawSession*> session_view_;
  std::unique_ptr<RawGroup> group_;

 private:
  const std::string kind_;
};

}  // namespace epd::test
