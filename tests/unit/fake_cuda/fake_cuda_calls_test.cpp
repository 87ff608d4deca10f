// Calls on the fake driver: operations that streams ask for equal the reference.
#include "unit/fake_cuda/fake_cuda_call_world.h"
#include "unit/fake_cuda/fake_cuda_cases.h"

#include "proto/arena.h"

#include <algorithm>
#include <map>

namespace epd::fake_cuda_test {
namespace {

constexpr std::uint32_t kTokens = 12;

// Room for the worst case.
std::uint64_t recv_rows(const Case& c) {
  const ref::GroupParams& g = c.group;
  const std::uint64_t experts = g.num_experts / g.num_ranks;
  const std::uint64_t most = std::uint64_t{g.num_ranks} * kTokens;
  if (g.layout == ref::Layout::kCompact) return most;
  if (g.layout == ref::Layout::kExpert) return experts * g.expert_capacity;
  return most * std::min<std::uint64_t>(g.topk, experts) + experts * g.alignment;
}

Case draw(Random& random) {
  Case c = gpu_test::random_case(random, 256);
  c.group.masked.clear();
  c.group.expert_capacity = c.group.num_ranks * kTokens;
  c.weights = true;
  return c;
}

// A group whose ranks ask for operations in a random order, each of which is checked.
class CallRun {
 public:
  CallRun(const Case& c, Random& random)
      : case_(c),
        random_(random),
        calls_(shape_of(c, recv_rows(c)), kTokens),
        routings_(CallWorld::kRoutes),
        asked_(calls_.size()) {
    calls_.dispatch_flags = abi::kFlagWeights;
    if (c.mark_unused) calls_.dispatch_flags |= abi::kFlagMarkUnused;
    if (c.zero_padding) calls_.dispatch_flags |= abi::kFlagZeroPadding;
    if (c.weighted) calls_.combine_flags |= abi::kFlagWeights;
    calls_.combine_flags |= abi::return_flags(c.return_weights);
    for (std::uint32_t r = 0; r < size(); ++r) {
      calls_.own(r).host->start.index_base = kIndexBase;
      calls_.own(r).state->guaranteed_sms = 2;
      calls_.own(r).credits->limit = 5;
      calls_.open(r);
    }
    resume();
  }
  // A client's kernel may still be about to see that its call has ended, and looks at the words for that.
  ~CallRun() {
    for (std::uint32_t r = 0; r < size(); ++r) {
      calls_.close(r);
      EPD_CU(cuStreamSynchronize(calls_.own(r).client));
      EXPECT_TRUE(comes([&] { return now(calls_.own(r).credits->held) == 0; }));
    }
  }

  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) step();
  }

 private:
  static constexpr std::uint64_t kIndexBase = 1000;
  struct Routing {
    std::vector<ref::RankInput> inputs;
    std::vector<ref::RankReceived> expected;
    std::vector<RouteState> states;  // of each rank
  };
  std::uint32_t size() const { return calls_.size(); }

  // Goes on after a halt, which has changed nothing, in a later epoch.
  void resume() {
    ++epoch_;
    for (std::uint32_t r = 0; r < size(); ++r) {
      CallWorld::Start start;
      start.epoch = epoch_;
      start.index = index_;
      for (std::uint32_t i = 0; i < CallWorld::kRoutes; ++i) {
        if (!routings_[i].states.empty()) start.routes[i] = routings_[i].states[r];
      }
      calls_.resume(r, start);
    }
  }

  void step() {
    const auto route = static_cast<std::uint32_t>(random_() % CallWorld::kRoutes);
    const bool known = !routings_[route].inputs.empty();
    const auto drawn = random_() % 12;
    if (drawn < 4 || (drawn < 9 && !known)) {
      dispatch(route);
    } else if (drawn < 6) {
      redo(route);
    } else if (drawn < 9) {
      combine(route);
    } else if (drawn == 9) {
      noop();
    } else if (drawn == 10) {
      restart();
    } else {
      for (std::uint32_t r = 0; r < size(); ++r) calls_.halt(r);
      resume();
    }
  }

  void give(std::uint32_t r, const ref::RankInput& input) {
    Rank& rank = calls_.rank(r);
    put(rank.x, input.x);
    put(rank.x_scales, input.x_scales);
    if (case_.index64) {
      put(rank.topk_idx, input.topk_idx);
    } else {
      put(rank.topk_idx, std::vector<std::int32_t>(input.topk_idx.begin(), input.topk_idx.end()));
    }
    put(rank.topk_weights, input.topk_weights);
  }

  // On every rank, and until it has ended there. Of the rank's stream or of its host, in a place for a result
  // that is new or that was used before.
  void ask(const abi::Call& call, const Routing* makes) {
    for (std::uint32_t r = 0; r < size(); ++r) {
      Asked& asked = asked_[r];
      asked.call = call;
      asked.by_host = random_() % 3 == 0;
      asked.replayed = random_() % 2;
      const std::uint32_t place =
          asked.replayed ? abi::kOnceResults + random_() % 2 : call_ % abi::kOnceResults;
      asked.call.result = abi::result_of(place, asked.replayed ? 0 : call_ / abi::kOnceResults);
      if (makes != nullptr) asked.call.num_tokens = makes->inputs[r].num_tokens;
      CallWorld::Ring how;
      how.num_tokens = asked.call.num_tokens;
      how.flagged = asked.flagged = !asked.by_host && random_() % 2;
      how.waits = random_() % 2;
      if (asked.by_host) {
        calls_.call_by_host(r, asked.call);
      } else {
        calls_.ring(r, asked.call, how);
      }
    }
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r) + ", call " + std::to_string(call_));
      check_end(r, call);
    }
    ++call_;
    if (call.op != abi::Op::kNoop) ++index_;
  }

  void check_end(std::uint32_t r, const abi::Call& call) {
    Asked& asked = asked_[r];
    const JournalEntry entry = calls_.journal(r);
    CallRank& own = calls_.own(r);
    EXPECT_EQ(entry.result.error, OpError::kNone);
    const abi::Call told = abi::unpack(entry.call);
    EXPECT_EQ(told.number, asked.by_host ? asked.host_calls : asked.stream_calls);
    EXPECT_EQ(entry.ring, asked.by_host ? kernels::cuda::kByHost : kernels::cuda::kByStreams);
    EXPECT_EQ(told.op, call.op);
    EXPECT_EQ(told.slot, call.slot);
    EXPECT_EQ(told.flags, call.flags);
    EXPECT_EQ(told.num_tokens, asked.call.num_tokens);
    EXPECT_EQ(entry.index, index_);
    EXPECT_EQ(entry.result.ran_ns != 0, call.op != abi::Op::kNoop);
    ++(asked.by_host ? asked.host_calls : asked.stream_calls);
    EXPECT_TRUE(comes([&] { return now(own.words->done) == asked.stream_calls; }));
    EXPECT_TRUE(comes([&] { return now(own.results->host_ended) == asked.host_calls; }));
    EXPECT_EQ(now(own.words->failed), 0u);
    const std::uint32_t flag = abi::flag_of(call.op, call.slot);
    EXPECT_EQ(now(own.words->flags[flag]) != 0, asked.flagged);
    own.words->flags[flag] = 0;
    std::uint32_t runs = 1;
    if (asked.replayed) runs = ++asked.runs[asked.call.result];
    const abi::CallEnd end = calls_.result(r, asked.call.result, runs);
    EXPECT_EQ(end.ending, abi::CallEnding::kCarriedOut);
    EXPECT_EQ(end.index, index_ + kIndexBase);
    EXPECT_EQ(end.num_recv_rows, entry.result.num_recv_rows);
    if (call.op == abi::Op::kDispatch) check_counts(r, asked.call.result + 1);
    calls_.tell_read(r);
  }

  // What the host is told is what lies in the regions.
  void check_counts(std::uint32_t r, std::uint32_t mark) {
    const abi::GroupShape shape = gpu_test::group_shape(calls_.world().shape(), kTokens, CallWorld::kDepth);
    const abi::ResultsLayout layout(shape);
    const abi::PlacementParts at(shape);
    const auto* const words =
        reinterpret_cast<const std::uint64_t*>(reinterpret_cast<const std::byte*>(calls_.own(r).results) +
                                               layout.counts + layout.counts_stride * asked_[r].call.slot);
    const kernels::cuda::CountOutputs& regions = calls_.rank(r).counts;
    const auto compare = [&](std::uint64_t first, const std::int32_t* region, std::uint32_t count) {
      for (std::uint32_t i = 0; i < count; ++i) {
        ASSERT_EQ(words[first + i] >> 32, mark);
        ASSERT_EQ(static_cast<std::int32_t>(words[first + i]), region[i]);
      }
    };
    compare(at.rank_offsets, regions.rank_offsets, size() + 1);
    compare(at.expert_counts, regions.expert_counts, shape.experts_per_rank());
    if (shape.per_expert()) compare(at.expert_offsets, regions.expert_offsets, shape.experts_per_rank() + 1);
  }

  void dispatch(std::uint32_t route) {
    Routing& routing = routings_[route];
    routing.inputs.clear();
    for (std::uint32_t r = 0; r < size(); ++r) {
      const auto tokens = static_cast<std::uint32_t>(random_() % (kTokens + 1));
      routing.inputs.push_back(gpu_test::random_input(random_, case_, tokens));
      give(r, routing.inputs[r]);
    }
    routing.expected = ref::dispatch(case_.group, routing.inputs);
    routing.states.resize(size());
    for (std::uint32_t r = 0; r < size(); ++r) {
      RouteState& state = routing.states[r];
      state = {abi::op_tag(epoch_, index_), routing.inputs[r].num_tokens, 1 - state.half};
    }
    ask(calls_.dispatch(route), &routing);
    check(routing, "dispatch");
    for (std::uint32_t r = 0; r < size(); ++r) {
      const RouteState& now_there = calls_.own(r).routes[route];
      EXPECT_EQ(now_there.tag, routing.states[r].tag);
      EXPECT_EQ(now_there.half, routing.states[r].half);
    }
  }

  // With rows of its own by the routing that is known.
  void redo(std::uint32_t route) {
    Routing& routing = routings_[route];
    for (std::uint32_t r = 0; r < size(); ++r) {
      const ref::RankInput fresh = gpu_test::random_input(random_, case_, routing.inputs[r].num_tokens);
      routing.inputs[r].x = fresh.x;
      routing.inputs[r].x_scales = fresh.x_scales;
      routing.inputs[r].topk_weights = fresh.topk_weights;
      give(r, routing.inputs[r]);
    }
    routing.expected = ref::dispatch(case_.group, routing.inputs);
    ask(calls_.cached(route), nullptr);
    check(routing, "cached dispatch");
  }

  void check(const Routing& routing, const char* what) {
    const auto& s = calls_.world().shape();
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE(std::string(what) + ", rank " + std::to_string(r));
      const ref::RankReceived& want = routing.expected[r];
      const kernels::DispatchTarget& target = calls_.rank(r).peer.target;
      const auto scales = ref::scales_by_row(case_.group, s.recv_rows, target.recv_scales);
      for (std::size_t i = 0; i < want.num_rows; ++i) {
        if (want.recv_src[i * 2] < 0) continue;
        const auto row = [&](const void* from, std::size_t bytes) {
          return get<std::uint8_t>(static_cast<const std::uint8_t*>(from) + i * bytes, bytes);
        };
        ASSERT_TRUE(row(target.recv_x, s.format.row_bytes) == row(want.recv_x.data(), s.format.row_bytes));
        ASSERT_TRUE(row(scales.data(), s.format.scale_bytes) ==
                    row(want.recv_scales.data(), s.format.scale_bytes));
        ASSERT_TRUE(row(target.recv_src, 8) == row(want.recv_src.data(), 8));
        const std::size_t choices = calls_.world().choices();
        ASSERT_TRUE(row(target.recv_topk_weights, choices * 4) ==
                    row(want.recv_topk_weights.data(), choices * 4));
      }
    }
  }

  void combine(std::uint32_t route) {
    const Routing& routing = routings_[route];
    const auto& s = calls_.world().shape();
    std::vector<ref::CombineInput> answers(size());
    for (std::uint32_t r = 0; r < size(); ++r) {
      const Rank& rank = calls_.rank(r);
      const std::uint32_t rows = routing.expected[r].num_rows;
      answers[r].y = gpu_test::random_bf16s(random_, std::size_t{rows} * s.hidden);
      answers[r].y_weights = gpu_test::random_floats(random_, rows * calls_.world().choices());
      put(rank.y, answers[r].y);
      put(rank.y_weights, answers[r].y_weights);
      give(r, routing.inputs[r]);
    }
    ask(calls_.combine(route), nullptr);
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE("combine, rank " + std::to_string(r));
      const ref::RankCombined want =
          ref::combine_to(case_.group, routing.inputs, answers, {case_.weighted, case_.return_weights}, r);
      EXPECT_TRUE(get<std::uint16_t>(calls_.rank(r).out, want.out.size()) == want.out) << "out";
      const auto weights = get<std::uint32_t>(calls_.rank(r).out_weights, want.out_weights.size());
      for (std::size_t i = 0; i < weights.size(); ++i)
        ASSERT_EQ(weights[i], std::bit_cast<std::uint32_t>(want.out_weights[i]));
    }
  }

  void noop() { ask(CallWorld::noop(), nullptr); }

  void restart() {
    for (std::uint32_t r = 0; r < size(); ++r) {
      calls_.halt(r);
      calls_.close(r);
      calls_.open(r);
    }
    resume();
  }

  const Case case_;
  Random& random_;
  CallWorld calls_;
  std::vector<Routing> routings_;
  // What a rank was asked last, and how much before.
  struct Asked {
    abi::Call call;
    bool by_host = false;
    bool replayed = false;
    bool flagged = false;
    std::uint32_t stream_calls = 0;
    std::uint32_t host_calls = 0;
    std::map<std::uint32_t, std::uint32_t> runs;  // by result
  };
  std::vector<Asked> asked_;
  std::uint64_t epoch_ = 0;
  std::uint64_t index_ = 0;
  std::uint32_t call_ = 0;
};

TEST(FakeCudaCalls, EqualTheReference) {
  const std::uint64_t first = first_seed();
  for (std::uint64_t seed = first; seed < first + 10; ++seed) {
    Random random(seed);
    const Case c = draw(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c.text());
    CallRun(c, random).run(24);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace epd::fake_cuda_test
