// The kernels of the fake driver against the reference, bit for bit, and the ways in which they end.
#include "support/left_out_rows.h"
#include "unit/fake_cuda/fake_cuda_cases.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <thread>

namespace epd::fake_cuda_test {
namespace {

constexpr int kPoison = 0xcd;

// Dispatch, perhaps again with the same routing, and combine.
class CaseRun {
 public:
  CaseRun(const Case& c, Random& random) : case_(c), random_(random) {
    for (const std::uint32_t tokens : c.tokens) inputs_.push_back(gpu_test::random_input(random, c, tokens));
    if (c.group.layout == ref::Layout::kExpert) case_.group.expert_capacity = fullest_expert() + 1;
    expected_ = ref::dispatch(case_.group, inputs_);
    std::uint64_t rows = 1;
    for (const auto& received : expected_) rows = std::max<std::uint64_t>(rows, received.num_rows);
    if (c.group.layout != ref::Layout::kExpert) rows += random() % 3;
    const std::uint32_t tokens = std::max(*std::max_element(c.tokens.begin(), c.tokens.end()), 1u);
    world_ = std::make_unique<World>(shape_of(case_, rows), tokens, c.group.masked);
    for (std::uint32_t r = 0; r < world_->size(); ++r) give(r);
  }

  void run() {
    dispatch(false);
    if (case_.cached && !::testing::Test::HasFailure()) dispatch(true);
    if (!::testing::Test::HasFailure()) combine();
  }

 private:
  std::uint32_t fullest_expert() const {
    std::vector<std::uint32_t> counts(case_.group.num_experts, 0);
    for (const auto& input : inputs_) {
      for (const std::int64_t e : input.topk_idx) {
        if (e >= 0) ++counts[static_cast<std::size_t>(e)];
      }
    }
    return *std::max_element(counts.begin(), counts.end());
  }

  void give(std::uint32_t r) {
    Rank& rank = world_->rank(r);
    const ref::RankInput& input = inputs_[r];
    rank.num_tokens = input.num_tokens;
    put(rank.x, input.x);
    put(rank.x_scales, input.x_scales);
    if (case_.index64) {
      put(rank.topk_idx, input.topk_idx);
    } else {
      put(rank.topk_idx, std::vector<std::int32_t>(input.topk_idx.begin(), input.topk_idx.end()));
    }
    put(rank.topk_weights, input.topk_weights);
  }

  template <typename Visit>
  void for_ranks_there(Visit visit) {
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      if (!world_->masked(r)) visit(r);
    }
  }

  void poison(std::uint32_t r) {
    const auto& s = world_->shape();
    const kernels::DispatchTarget& target = world_->rank(r).peer.target;
    std::memset(target.recv_x, kPoison, s.recv_rows * s.format.row_bytes);
    std::memset(target.recv_scales, kPoison, s.format.scales_bytes(s.recv_rows));
    std::memset(target.recv_topk_idx, kPoison, s.recv_rows * world_->choices() * (s.index64 ? 8 : 4));
    std::memset(target.recv_topk_weights, kPoison, s.recv_rows * world_->choices() * 4);
    std::memset(target.recv_src, kPoison, s.recv_rows * 8);
  }

  void dispatch(bool cached) {
    const std::uint64_t tag = world_->next_tag();
    for_ranks_there([&](std::uint32_t r) { poison(r); });
    for_ranks_there([&](std::uint32_t r) {
      Operation op = world_->operation(r, tag, 1);
      op.cached = cached;
      op.mark_unused = case_.mark_unused;
      op.zero_padding = case_.zero_padding;
      op.x_scales = case_.group.payload == ref::Payload::kFp8 ? world_->rank(r).x_scales : nullptr;
      op.topk_weights = inputs_[r].topk_weights.empty() ? nullptr : world_->rank(r).topk_weights;
      world_->start(Kind::kDispatch, op);
    });
    world_->wait();
    for_ranks_there([&](std::uint32_t r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      check_result(r, tag, cached);
      check_counts(r, tag);
      check_rows(r);
      check_books(r);
    });
  }

  void check_result(std::uint32_t r, std::uint64_t tag, bool cached) {
    const OpResult& result = *world_->rank(r).result;
    const abi::RoutingRecord& head = *world_->rank(r).head;
    const std::uint32_t dropped = ref::dropped_selections(case_.group, inputs_[r]);
    EXPECT_EQ(result.tag, tag);
    EXPECT_EQ(result.error, OpError::kNone);
    EXPECT_EQ(result.num_recv_rows, expected_[r].num_recv_rows);
    EXPECT_EQ(result.num_dropped, cached ? 0 : dropped);
    if (!cached) {
      EXPECT_EQ(head.handle, tag);
    }
    EXPECT_EQ(head.epoch, 7u);
    EXPECT_EQ(head.num_tokens, inputs_[r].num_tokens);
    EXPECT_EQ(head.num_recv_rows, expected_[r].num_recv_rows);
    EXPECT_EQ(head.num_dropped, dropped);
  }

  void check_counts(std::uint32_t r, std::uint64_t tag) {
    const auto& s = world_->shape();
    const ref::RankReceived& want = expected_[r];
    const auto same = [](const std::int32_t* got, const std::vector<std::int32_t>& values) {
      return get<std::int32_t>(got, values.size()) == values;
    };
    const kernels::cuda::CountOutputs& counts = world_->rank(r).counts;
    EXPECT_TRUE(same(counts.rank_offsets, want.rank_offsets));
    EXPECT_TRUE(same(counts.expert_counts, want.expert_counts));
    EXPECT_TRUE(same(counts.expert_offsets, want.expert_offsets));
    EXPECT_TRUE(same(counts.source_ranges, want.source_ranges));
    const auto told = [&](std::size_t first, const std::vector<std::int32_t>& values) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint64_t word = counts.host_words[first + i];
        if (word >> 32 != static_cast<std::uint32_t>(tag) || static_cast<std::int32_t>(word) != values[i])
          return false;
      }
      return true;
    };
    const std::size_t offsets = s.per_expert ? s.num_experts : s.num_ranks;
    EXPECT_TRUE(told(offsets, want.rank_offsets));
    EXPECT_TRUE(told(offsets + s.num_ranks + 1, want.expert_counts));
  }

  // Whether row i has to be as the reference says, or else untouched. Layout expert leaves gaps.
  bool is_written(const ref::RankReceived& want, std::size_t i) const {
    if (i >= want.num_rows) return case_.mark_unused;
    return want.recv_src[i * 2] >= 0 || case_.mark_unused || case_.group.layout == ref::Layout::kPacked;
  }

  void check_rows(std::uint32_t r) {
    const std::vector<std::uint8_t> scales =
        ref::scales_by_row(case_.group, world_->shape().recv_rows, world_->rank(r).peer.target.recv_scales);
    const RowPart parts[] = {
        {"recv_x", world_->rank(r).peer.target.recv_x, &expected_[r].recv_x,
         world_->shape().format.row_bytes},
        {"recv_scales", scales.data(), &expected_[r].recv_scales, world_->shape().format.scale_bytes}};
    for (const RowPart& part : parts) {
      for (std::size_t i = 0; i < world_->shape().recv_rows; ++i) {
        const ref::RankReceived& want = expected_[r];
        const bool filled = i < want.num_rows && want.recv_src[i * 2] >= 0;
        const auto got =
            get<std::uint8_t>(static_cast<const std::uint8_t*>(part.got) + i * part.bytes, part.bytes);
        std::vector<std::uint8_t> row(part.bytes, is_written(want, i) && case_.zero_padding ? 0 : kPoison);
        if (filled) row = get<std::uint8_t>(part.want->data() + i * part.bytes, part.bytes);
        ASSERT_TRUE(got == row) << part.name << " row " << i << " of " << want.num_rows;
      }
    }
  }
  struct RowPart {
    const char* name;
    const void* got;
    const std::vector<std::uint8_t>* want;
    std::size_t bytes;
  };

  void check_books(std::uint32_t r) {
    const auto& s = world_->shape();
    const ref::RankReceived& want = expected_[r];
    const kernels::DispatchTarget& target = world_->rank(r).peer.target;
    const std::size_t choices = world_->choices();
    const auto index_at = [&](std::size_t at) {
      return s.index64 ? static_cast<const std::int64_t*>(target.recv_topk_idx)[at]
                       : static_cast<const std::int32_t*>(target.recv_topk_idx)[at];
    };
    const auto untouched = static_cast<std::int32_t>(0xcdcdcdcd);
    for (std::size_t i = 0; i < s.recv_rows; ++i) {
      const bool written = is_written(want, i);
      const bool exists = i < want.num_rows;
      for (std::size_t j = 0; j < 2; ++j) {
        ASSERT_EQ(target.recv_src[i * 2 + j], !written ? untouched : exists ? want.recv_src[i * 2 + j] : -1);
      }
      for (std::size_t at = i * choices; at < (i + 1) * choices; ++at) {
        const std::int64_t none = s.index64 ? static_cast<std::int64_t>(0xcdcdcdcdcdcdcdcd) : untouched;
        ASSERT_EQ(index_at(at), !written ? none : exists ? want.recv_topk_idx[at] : -1);
        const float weight = exists ? want.recv_topk_weights[at] : 0.0f;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(target.recv_topk_weights[at]),
                  written ? std::bit_cast<std::uint32_t>(weight) : 0xcdcdcdcd);
      }
    }
  }

  void combine() {
    const auto& s = world_->shape();
    std::vector<ref::CombineInput> answers(world_->size());
    for_ranks_there([&](std::uint32_t r) {
      const Rank& rank = world_->rank(r);
      answers[r].y = gpu_test::random_bf16s(random_, std::size_t{expected_[r].num_rows} * s.hidden);
      if (case_.weighted) test::spoil_left_out_rows(case_.group, inputs_, expected_[r], r, answers[r].y);
      answers[r].y_weights = gpu_test::random_floats(random_, expected_[r].num_rows * world_->choices());
      put(rank.y, answers[r].y);
      put(rank.y_weights, answers[r].y_weights);
      for (std::uint32_t b = 0; b < case_.biases; ++b) {
        answers[r].bias[b] = gpu_test::random_bf16s(random_, std::size_t{rank.num_tokens} * s.hidden);
        put(rank.bias[b], answers[r].bias[b]);
      }
    });
    const std::uint64_t tag = world_->next_tag();
    for_ranks_there([&](std::uint32_t r) {
      const Rank& rank = world_->rank(r);
      Operation op = world_->operation(r, tag, 2);
      op.topk_weights = case_.weighted ? rank.topk_weights : nullptr;
      for (std::uint32_t b = 0; b < case_.biases; ++b) op.bias[b] = rank.bias[b];
      op.out_weights = case_.return_weights != abi::kReturnNone ? rank.out_weights : nullptr;
      op.sum_weights = case_.return_weights == abi::kReturnSum;
      world_->start(Kind::kCombine, op);
    });
    world_->wait();
    for_ranks_there([&](std::uint32_t r) {
      SCOPED_TRACE("combine, rank " + std::to_string(r));
      const Rank& rank = world_->rank(r);
      EXPECT_EQ(rank.result->tag, tag);
      EXPECT_EQ(rank.result->error, OpError::kNone);
      const ref::RankCombined want =
          ref::combine_to(case_.group, inputs_, answers, {case_.weighted, case_.return_weights}, r);
      EXPECT_TRUE(get<std::uint16_t>(rank.out, want.out.size()) == want.out) << "out";
      EXPECT_EQ(bits(get<float>(rank.out_weights, want.out_weights.size())), bits(want.out_weights));
    });
  }

  Case case_;
  Random& random_;
  std::vector<ref::RankInput> inputs_;
  std::vector<ref::RankReceived> expected_;
  std::unique_ptr<World> world_;
};

TEST(FakeCudaKernels, EqualTheReference) {
  const std::uint64_t first = first_seed();
  for (std::uint64_t seed = first; seed < first + 40; ++seed) {
    Random random(seed);
    const Case c = gpu_test::random_case(random, 1024);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c.text());
    CaseRun(c, random).run();
    if (HasFailure()) return;
  }
}

// Two ranks of four experts each, 16 tokens of four choices.
class FakeCudaEndings : public ::testing::Test {
 protected:
  void make(std::uint64_t room, ref::Layout layout = ref::Layout::kCompact) {
    Case c;
    c.group.num_ranks = 2;
    c.group.num_experts = 8;
    c.group.hidden = 256;
    c.group.topk = 4;
    c.group.layout = layout;
    if (layout == ref::Layout::kExpert) c.group.expert_capacity = static_cast<std::uint32_t>(room / 4);
    world_ = std::make_unique<World>(shape_of(c, room), 16, std::vector<bool>());
    for (std::uint32_t r = 0; r < 2; ++r) {
      world_->rank(r).num_tokens = 16;
      for (std::size_t i = 0; i < 64; ++i) choices(r)[i] = static_cast<std::int64_t>(i % 8);
    }
  }
  std::int64_t* choices(std::uint32_t r) { return static_cast<std::int64_t*>(world_->rank(r).topk_idx); }
  void start(std::uint32_t r, std::uint64_t tag, std::uint64_t timeout_ns, std::uint32_t what = 1) {
    Operation op = world_->operation(r, tag, what);
    op.timeout_ns = timeout_ns;
    world_->start(Kind::kDispatch, op);
  }
  const OpResult& result(std::uint32_t r) { return *world_->rank(r).result; }
  static constexpr std::uint64_t kLong = 30'000'000'000;
  std::unique_ptr<World> world_;
};

TEST_F(FakeCudaEndings, ABadChoiceIsRefused) {
  make(64);
  choices(0)[5 * 4 + 2] = 8;
  start(0, 1, kLong);
  world_->wait();
  EXPECT_EQ(result(0).tag, 1u);
  EXPECT_EQ(result(0).error, OpError::kBadChoice);
  EXPECT_EQ(result(0).failed_rank, 0);
  EXPECT_EQ(result(0).token, 5u);
  EXPECT_EQ(result(0).k, 2u);
  EXPECT_EQ(result(0).value, 8);
  EXPECT_EQ(result(0).expert, -1);
  choices(0)[5 * 4 + 2] = INT64_MAX;
  start(0, 2, kLong);
  world_->wait();
  EXPECT_EQ(result(0).value, INT32_MAX);
}

TEST_F(FakeCudaEndings, AMissingRankEndsInTheDeadline) {
  make(64);
  start(0, 1, 20'000'000);
  world_->wait();
  EXPECT_EQ(result(0).tag, 1u);
  EXPECT_EQ(result(0).error, OpError::kDeadline);
  EXPECT_EQ(result(0).failed_rank, 1);
}

TEST_F(FakeCudaEndings, TheAbortWordEndsAWait) {
  make(64);
  start(0, 1, kLong);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::atomic_ref(*world_->rank(0).abort).store(1);
  world_->wait();
  EXPECT_EQ(result(0).error, OpError::kAborted);
  EXPECT_EQ(result(0).failed_rank, 1);
}

TEST_F(FakeCudaEndings, DifferentOperationsAreNoticedAndTheNextRuns) {
  make(64);
  start(0, 1, kLong, 1);
  start(1, 1, kLong, 2);
  world_->wait();
  EXPECT_EQ(result(0).error, OpError::kMismatch);
  EXPECT_EQ(result(0).failed_rank, 1);
  EXPECT_EQ(result(1).error, OpError::kMismatch);
  EXPECT_EQ(result(1).failed_rank, 0);
  start(0, 2, kLong);
  start(1, 2, kLong);
  world_->wait();
  EXPECT_EQ(result(0).tag, 2u);
  EXPECT_EQ(result(0).error, OpError::kNone);
  EXPECT_EQ(result(0).num_recv_rows, 16u);
}

TEST_F(FakeCudaEndings, TooLittleRoomIsRefusedAlikeEverywhere) {
  make(15);
  start(0, 1, kLong);
  start(1, 1, kLong);
  world_->wait();
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result(r).error, OpError::kNoRoom);
    EXPECT_EQ(result(r).failed_rank, 0);
    EXPECT_EQ(result(r).rows, 16u);
    EXPECT_EQ(result(r).room, 15u);
    EXPECT_EQ(result(r).expert, -1);
  }
  EXPECT_EQ(world_->rank(0).head->handle, 0u);
  make(60, ref::Layout::kExpert);
  start(0, 1, kLong);
  start(1, 1, kLong);
  world_->wait();
  EXPECT_EQ(result(1).error, OpError::kNoRoom);
  EXPECT_EQ(result(1).expert, 0);
  EXPECT_EQ(result(1).rows, 16u);
  EXPECT_EQ(result(1).room, 15u);
}

TEST_F(FakeCudaEndings, ADestroyedStreamEndsItsKernel) {
  make(64);
  start(0, 1, kLong);
  EPD_CU(cuStreamDestroy(world_->rank(0).stream));
  EPD_CU(cuStreamCreate(&world_->rank(0).stream, CU_STREAM_NON_BLOCKING));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(result(0).tag, 0u);
}

TEST_F(FakeCudaEndings, AddressesOutOfReachEndTheContext) {
  make(64);
  const auto local = std::make_unique<OpResult>();
  Operation op = world_->operation(0, 1, 1);
  op.result = local.get();  // not pinned
  world_->start(Kind::kDispatch, op);
  EXPECT_EQ(cuStreamSynchronize(world_->rank(0).stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(cuStreamQuery(world_->rank(0).stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuMemAlloc(&memory, 1), CUDA_ERROR_ILLEGAL_ADDRESS);
  EPD_CU(cuCtxSetCurrent(world_->rank(1).context));
  EXPECT_EQ(cuStreamQuery(world_->rank(1).stream), CUDA_SUCCESS);
  world_.reset();
  make(64);
  EPD_CU(cuCtxSetCurrent(world_->rank(0).context));
  EXPECT_EQ(cuStreamQuery(world_->rank(0).stream), CUDA_SUCCESS);
}

TEST_F(FakeCudaEndings, ALaunchAsksForNoMoreThanThereIs) {
  make(64);
  Operation op = world_->operation(0, 1, 1);
  op.division.ctas = 133;
  EXPECT_THROW(world_->start(Kind::kDispatch, op), std::runtime_error);
  op.division.ctas = kCtas;
  op.division.shared_bytes = kShared + 1;  // more than cuKernelSetAttribute has allowed
  EXPECT_THROW(world_->start(Kind::kDispatch, op), std::runtime_error);
  world_->wait();
}

}  // namespace
}  // namespace epd::fake_cuda_test
