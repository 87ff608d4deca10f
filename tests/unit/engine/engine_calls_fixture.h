// The same group on GPUs of the fake driver, with pairs of kernels ahead: streams of ranks 0 and 1 make calls
// (unless a test wants others), as the client's kernels do; of rank 2 its host. All see the same operations.
// Or on host devices, where ranks submit.
#pragma once

#include "engine_fixture.h"
#include "kernels/cuda.h"
#include "kernels/workers.h"
#include "proto/call_words.h"

#include <atomic>
#include <chrono>
#include <iterator>
#include <optional>

namespace epd::test {

constexpr abi::Call call_on(Op op, std::uint32_t slot) {
  abi::Call call;
  call.op = op;
  call.slot = call.route = slot;
  return call;
}
constexpr abi::Call dispatch_on(std::uint32_t slot) {
  return call_on(Op::kDispatch, slot);
}
constexpr abi::Call combine_on(std::uint32_t slot) {
  return call_on(Op::kCombine, slot);
}
inline constexpr abi::Call kNoopCall = call_on(Op::kNoop, 0);
inline constexpr std::uint32_t kNoopFlag = abi::flag_of(Op::kNoop, 0);

// As a client's kernel stores it.
inline void store_call(abi::PackedCall (&calls)[abi::kCallSlots], const abi::Call& call) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& to = calls[call.number % abi::kCallSlots];
  for (std::uint32_t i = abi::PackedCall::kWords; i-- > 0;)
    std::atomic_ref(to.words[i]).store(packed.words[i], std::memory_order_release);
}

// What the client does for one rank: its kernels, or by_host() its library.
class Ringer {
 public:
  Ringer(abi::CallWords& words, abi::Results& results, bool by_host = false)
      : words_(&words), results_(&results), by_host_(by_host) {}

  // Returns the number.
  std::uint32_t ring(abi::Call call, std::uint32_t num_tokens, std::uint64_t epoch, bool flagged = false) {
    call.number = by_host_ ? host_tail_++ : words_->tail++;
    call.num_tokens = num_tokens;
    call.epoch = static_cast<std::uint32_t>(epoch & 0xff);
    call.flagged = flagged;
    call.result = result_of(call.number);
    if (flagged) words_->flags[abi::flag_of(call.op, call.slot)] = 0;
    store_call(by_host_ ? words_->host_calls : words_->calls, call);
    std::atomic_ref(words_->bell[by_host_ ? 1 : 0]).store(1);
    return call.number;
  }
  bool ended(std::uint32_t number, int timeout_ms = 10'000) {
    return comes([&] { return static_cast<std::int32_t>(done() - number) > 0; }, timeout_ms);
  }
  // After ended().
  abi::CallEnd end(std::uint32_t number) {
    const abi::CallResult& place = results_->places[abi::place_of(result_of(number))];
    abi::CallEnd end;
    EXPECT_TRUE(comes([&] {
      std::uint64_t words[abi::CallResult::kWords];
      for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
        words[i] = std::atomic_ref(const_cast<std::uint64_t&>(place.words[i])).load();
      return abi::read_result(words, end) && end.result == result_of(number);
    }));
    return end;
  }
  std::uint32_t done() {
    return std::atomic_ref(by_host_ ? results_->host_ended : words_->done).load(std::memory_order_acquire);
  }
  std::uint32_t tail() const { return by_host_ ? host_tail_ : words_->tail; }
  std::uint32_t failed() { return std::atomic_ref(words_->failed).load(); }

 private:
  static std::uint32_t result_of(std::uint32_t number) {
    return abi::result_of(number % abi::kOnceResults, number / abi::kOnceResults);
  }

  abi::CallWords* words_;
  abi::Results* results_;
  bool by_host_;
  std::uint32_t host_tail_ = 0;
};

class EngineCallsFixture : public EngineFixture {
 protected:
  explicit EngineCallsFixture(std::vector<std::uint32_t> by_stream = {1, 1, 0}, std::string kind = "cuda")
      : EngineFixture(std::move(kind), std::move(by_stream)) {}

  void SetUp() override {
    EngineFixture::SetUp();
    next_ = first_op_;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ringers_.push_back(new_ringer(rank));
  }
  void TearDown() override {
    engines_.clear();  // before the memory
  }

  Ringer new_ringer(std::uint32_t rank) const {
    return {group_->words(rank), group_->results(rank), by_stream_[rank] == 0};
  }
  bool by_stream(std::uint32_t rank) const { return by_stream_[rank] != 0; }
  std::uint32_t ring(std::uint32_t rank, const abi::Call& call, std::uint32_t num_tokens = 0) {
    return ringers_[rank].ring(call, num_tokens, group_->epoch);
  }
  // It was carried out.
  bool ends_well(std::uint32_t rank, std::uint32_t number) {
    return ringers_[rank].ended(number) && ringers_[rank].end(number).ending == abi::CallEnding::kCarriedOut;
  }

  // One operation of every rank that is there, by whatever it uses. A combine that is submitted uses the
  // routing of the operation before, or of `routing`.
  void run(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
           std::optional<std::uint64_t> routing = {}) {
    await_ends(slot, ask(op, slot, inputs, routing));
  }
  // Returns the numbers of calls.
  std::vector<std::uint32_t> ask(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
                                 std::optional<std::uint64_t> routing = {}) {
    std::vector<std::uint32_t> numbers(kRanks);
    for (const std::uint32_t rank : there_) {
      const std::uint32_t n = op == Op::kDispatch ? inputs[rank].num_tokens : 0;
      if (calls()) {
        numbers[rank] = ring(rank, call_on(op, slot), n);
      } else {
        abi::Submission s = submission(rank, op, slot);
        s.num_tokens = n;
        if (op == Op::kCombine) s.handle = routing.value_or(next_ - 1);
        session(rank).submit(s);
      }
    }
    return numbers;
  }
  void await_ends(std::uint32_t slot, const std::vector<std::uint32_t>& numbers) {
    for (const std::uint32_t rank : there_) {
      if (calls()) {
        ASSERT_TRUE(ringers_[rank].ended(numbers[rank])) << "rank " << rank << state();
        const abi::CallEnd end = ringers_[rank].end(numbers[rank]);
        ASSERT_EQ(end.ending, abi::CallEnding::kCarriedOut) << "rank " << rank << state();
        ASSERT_EQ(end.index, next_);
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

  void break_and_resume(StatusCode cause) {
    break_all(cause);
    if (!HasFatalFailure()) resume_all();
  }
  void break_all(StatusCode cause) {
    EngineFixture::break_all(cause);
    next_ = group_->resume_index;
  }

  // What rank `at` was told of a call of the rank for an operation: it has called it, or not.
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
  // The rank's gate has told of its operation `index`.
  bool has_called(std::uint32_t rank, std::uint64_t index) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(rank);
    const auto* const called = reinterpret_cast<abi::SignalLine*>(
        exchange.bytes() + layout.block(in_tags(index), kShape.depth) + layout.called);
    return comes([&] {
      return std::atomic_ref(const_cast<std::uint64_t&>(called[rank].tag)).load() ==
             abi::op_tag(group_->epoch, in_tags(index));
    });
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

  // After it has been stopped. All go on from where its rank's board says: the
  // others have come as far.
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
  bool is_closed(std::uint32_t rank) {
    abi::CallWords& words = group_->words(rank);
    return comes([&] {
      return std::atomic_ref(words.closed).load() == 1 &&
             std::all_of(std::begin(words.flags), std::end(words.flags),
                         [](std::uint32_t& flag) { return std::atomic_ref(flag).load() == 1; });
    });
  }

  std::vector<Ringer> ringers_;
  std::vector<std::uint32_t> there_{0, 1, 2};  // ranks
  std::uint64_t next_ = 0;                     // operation
};

}  // namespace epd::test
