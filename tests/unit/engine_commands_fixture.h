// The same group on GPUs of the fake driver, with kernels that stay: ranks 0 and 1 ask by commands (unless a
// test wants others), which the test rings as the client's kernels do; rank 2 submits. All see the same
// operations.
#pragma once

#include "engine_fixture.h"
#include "kernels/cuda.h"
#include "proto/commands.h"

#include <atomic>
#include <chrono>
#include <iterator>
#include <numeric>
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
inline void store_call(abi::CommandWords& words, const abi::Call& call) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& to = words.calls[call.number % abi::kCommandSlots];
  for (std::uint32_t i = abi::PackedCall::kWords; i-- > 0;)
    std::atomic_ref(to.words[i]).store(packed.words[i], std::memory_order_release);
}

// What the client's kernels do for one rank.
class Ringer {
 public:
  explicit Ringer(abi::CommandWords& words) : words_(words) {}

  // Returns the number.
  std::uint32_t ring(abi::Call call, std::uint32_t num_tokens, std::uint64_t epoch, bool flagged = false) {
    call.number = words_.tail++;
    call.num_tokens = num_tokens;
    call.epoch = static_cast<std::uint32_t>(epoch & 0xff);
    call.flagged = flagged;
    if (flagged) words_.flags[abi::flag_of(call.op, call.slot)] = 0;
    store_call(words_, call);
    return call.number;
  }
  bool ended(std::uint32_t number, int timeout_ms = 10'000) {
    return comes([&] { return static_cast<std::int32_t>(done() - number) > 0; }, timeout_ms);
  }
  std::uint32_t done() { return std::atomic_ref(words_.done).load(std::memory_order_acquire); }
  std::uint32_t failed() { return std::atomic_ref(words_.failed).load(); }

 private:
  abi::CommandWords& words_;
};

class EngineCommandsFixture : public EngineFixture {
 protected:
  explicit EngineCommandsFixture(std::vector<std::uint32_t> commands = {1, 1, 0})
      : EngineFixture("cuda", std::move(commands)) {}

  void SetUp() override {
    EngineFixture::SetUp();
    next_ = first_op_;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) ringers_.emplace_back(group_->words(rank));
  }
  void TearDown() override {
    engines_.clear();  // before the memory
  }

  bool by_stream(std::uint32_t rank) const { return commands_[rank] != 0; }

  // One operation of every rank that is there, by whatever it uses. A combine that is submitted uses the
  // routing of the operation before, or of `routing`.
  void run(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
           std::optional<std::uint64_t> routing = {}) {
    await_ends(slot, ask(op, slot, inputs, routing));
  }
  // Returns the numbers of commands.
  std::vector<std::uint32_t> ask(Op op, std::uint32_t slot, const std::vector<reference::RankInput>& inputs,
                                 std::optional<std::uint64_t> routing = {}) {
    std::vector<std::uint32_t> numbers(kRanks);
    for (const std::uint32_t rank : there_) {
      const std::uint32_t n = op == Op::kDispatch ? inputs[rank].num_tokens : 0;
      if (by_stream(rank)) {
        numbers[rank] = ringers_[rank].ring(call_on(op, slot), n, group_->epoch);
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
      if (by_stream(rank)) {
        ASSERT_TRUE(ringers_[rank].ended(numbers[rank])) << "rank " << rank << state();
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

  // Operation `index`, which waits for others, of the rank: they say that they have done their part in it.
  void all_arrive_at(std::uint32_t rank, std::uint64_t index) {
    const abi::ExchangeArenaLayout layout(kShape);
    const Mapping exchange = group_->map_exchange(rank);
    std::byte* const block = exchange.bytes() + layout.block(in_tags(index), kShape.depth);
    const std::uint64_t tag = abi::op_tag(group_->epoch, in_tags(index));
    const auto lines = [&](std::uint64_t offset) {
      return reinterpret_cast<abi::SignalLine*>(block + offset);
    };
    ASSERT_TRUE(takes_part(rank, index, rank));
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
    message.culprit_rank = 1;
    for (EngineThread* engine : engine_view_) engine->send(LinkType::kBreak, message);
    for (EngineThread* engine : engine_view_)
      ASSERT_TRUE(engine->expect(LinkType::kBroken).has_value()) << state();
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

  // As a stream's wait compares.
  bool stream_goes_on(std::uint32_t rank, std::uint32_t slot, std::uint32_t ticket) {
    std::uint32_t& done = group_->stream_words(rank, slot).done;
    return comes([&] { return static_cast<std::int32_t>(std::atomic_ref(done).load() - ticket) >= 0; });
  }

  std::vector<Ringer> ringers_;
  std::vector<std::uint32_t> there_{0, 1, 2};  // ranks
  std::uint64_t next_ = 0;                     // operation
};

}  // namespace epd::test
