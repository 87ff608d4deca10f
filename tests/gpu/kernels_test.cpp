// Every CUDA kernel against the reference, bit for bit, on fresh random inputs: all layouts, payloads and
// options, over all GPUs of the machine. Usage: kernels_test [cases] [seed] [hidden limit] [no-failures]
// [no-inboxes]. "no-failures" leaves out what depends on time: under a sanitizer
// a launch can take longer than a deadline. "no-inboxes" leaves out what racecheck can't follow: accesses of
// shared memory that a word there orders (CtaBoard).
// Or: kernels_test out-of-range. Then a combine takes a row that does not exist, which the image with range
// checks (kernels_test_asserts) has to stop.
#include "gpu/kernel_cases.h"
#include "gpu/world.h"
#include "support/left_out_rows.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>

namespace epd::gpu_test {
namespace {

constexpr int kPoison = 0xcd;
constexpr std::uint32_t kPoison32 = 0xcdcdcdcd;

template <typename T>
void put(T* to, const void* from, std::size_t bytes) {
  if (bytes != 0) EPD_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
template <typename T>
std::vector<T> get(const void* from, std::size_t count) {
  std::vector<T> values(count);
  if (count != 0) EPD_CUDA(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDefault));
  return values;
}

std::vector<std::int64_t> get_indices(const void* from, std::size_t count, bool index64) {
  if (index64) return get<std::int64_t>(from, count);
  const auto narrow = get<std::int32_t>(from, count);
  return {narrow.begin(), narrow.end()};
}

class CaseRun {
 public:
  CaseRun(const Case& c, Random& random) : case_(c), random_(random) {
    for (const std::uint32_t tokens : c.tokens) inputs_.push_back(random_input(random, c, tokens));
    choose_room();
    expected_ = ref::dispatch(case_.group, inputs_);
    std::uint64_t rows = 1;
    for (const auto& received : expected_) rows = std::max<std::uint64_t>(rows, received.num_rows);
    if (case_.group.layout != ref::Layout::kExpert) rows += random() % 3;
    world_ = std::make_unique<World>(
        WorldShape{shape_of(case_, rows), std::max(*std::max_element(c.tokens.begin(), c.tokens.end()), 1u),
                   c.group.masked, c.inbox, c.inboxes, true});
    heads_.resize(world_->size());
    for (std::uint32_t r = 0; r < world_->size(); ++r) give(r);
  }

  bool run() {
    dispatch(false);
    for (std::uint32_t r = 0; r < world_->size(); ++r) check_dispatch(r);
    if (case_.cached && good_) {
      dispatch(true);
      for (std::uint32_t r = 0; r < world_->size(); ++r) check_dispatch(r);
    }
    if (good_) combine();
    return good_ && world_->good();
  }

 private:
  void choose_room() {
    ref::GroupParams& g = case_.group;
    if (g.layout != ref::Layout::kExpert) return;
    std::vector<std::uint32_t> counts(g.num_experts, 0);
    for (const auto& input : inputs_) {
      for (std::uint32_t t = 0; t < input.num_tokens; ++t) {
        std::vector<bool> seen(g.num_experts, false);
        for (std::uint32_t k = 0; k < g.topk; ++k) {
          const auto e = input.topk_idx[std::size_t{t} * g.topk + k];
          if (e >= 0 && !seen[static_cast<std::size_t>(e)]) {
            seen[static_cast<std::size_t>(e)] = true;
            ++counts[static_cast<std::size_t>(e)];
          }
        }
      }
    }
    g.expert_capacity = std::max(*std::max_element(counts.begin(), counts.end()), 1u) + random_() % 3;
  }

  void give(std::uint32_t r) {
    Rank& rank = world_->rank(r);
    const ref::RankInput& input = inputs_[r];
    rank.num_tokens = input.num_tokens;
    put(rank.x, input.x.data(), input.x.size());
    put(rank.x_scales, input.x_scales.data(), input.x_scales.size());
    if (case_.index64) {
      put(rank.topk_idx, input.topk_idx.data(), input.topk_idx.size() * 8);
    } else {
      const std::vector<std::int32_t> narrow(input.topk_idx.begin(), input.topk_idx.end());
      put(rank.topk_idx, narrow.data(), narrow.size() * 4);
    }
    put(rank.topk_weights, input.topk_weights.data(), input.topk_weights.size() * 4);
  }

  void expect(bool condition, std::uint32_t rank, const char* what) {
    if (condition) return;
    good_ = false;
    std::printf("  rank %u: %s differs\n", rank, what);
  }

  void poison_received(std::uint32_t r) {
    const Rank& rank = world_->rank(r);
    const auto& s = world_->shape();
    const std::size_t choices = s.per_expert ? 1 : s.topk;
    EPD_CUDA(cudaSetDevice(rank.device));
    EPD_CUDA(cudaMemset(rank.peer.target.recv_x, kPoison, s.recv_rows * s.format.row_bytes));
    EPD_CUDA(cudaMemset(rank.peer.target.recv_scales, kPoison, s.format.scales_bytes(s.recv_rows)));
    EPD_CUDA(
        cudaMemset(rank.peer.target.recv_topk_idx, kPoison, s.recv_rows * choices * (s.index64 ? 8 : 4)));
    EPD_CUDA(cudaMemset(rank.peer.target.recv_topk_weights, kPoison, s.recv_rows * choices * 4));
    EPD_CUDA(cudaMemset(rank.peer.target.recv_src, kPoison, s.recv_rows * 8));
    EPD_CUDA(cudaMemset(rank.counts.rank_offsets, kPoison, (s.num_ranks + 1) * 4));
    EPD_CUDA(cudaMemset(rank.counts.expert_counts, kPoison, s.num_experts / s.num_ranks * 4));
    EPD_CUDA(cudaMemset(rank.head, kPoison, sizeof(*rank.head)));
  }

  void start_dispatch(std::uint32_t r, std::uint64_t tag, bool cached) {
    Operation op = world_->operation(r, tag, 1);
    op.cached = cached;
    if (!cached) op.routing.head = world_->rank(r).head;
    op.routing.handle = heads_[r].handle;
    op.routing.epoch = heads_[r].epoch;
    op.mark_unused = case_.mark_unused;
    op.zero_padding = case_.zero_padding;
    op.x_scales = case_.group.payload == ref::Payload::kFp8 ? world_->rank(r).x_scales : nullptr;
    op.topk_weights = inputs_[r].topk_weights.empty() ? nullptr : world_->rank(r).topk_weights;
    world_->start(Kind::kDispatch, op, case_.sms, case_.stages);
  }

  void dispatch(bool cached) {
    for (std::uint32_t r = 0; r < world_->size(); ++r) poison_received(r);
    const std::uint64_t tag = last_tag_ = world_->next_tag();
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      heads_[r] = {abi::index_of_tag(tag) + 1,
                   CallLane::kEpoch,
                   inputs_[r].num_tokens,
                   expected_[r].num_recv_rows,
                   ref::dropped_selections(case_.group, inputs_[r]),
                   kPoison32};
      if (!world_->masked(r)) start_dispatch(r, tag, cached);
      if (cached) std::memset(&heads_[r], kPoison, sizeof(heads_[r]));
    }
    world_->wait();
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      if (world_->masked(r)) continue;
      const OpResult result = world_->result(r);
      if (result.error != kernels::OpError::kNone || result.tag != tag) {
        std::printf("  rank %u: error %u failed_rank %d\n", r, static_cast<unsigned>(result.error),
                    result.failed_rank);
        good_ = false;
      }
      expect(result.num_recv_rows == expected_[r].num_recv_rows, r, "num_recv_rows");
      if (!cached)
        expect(result.num_dropped == ref::dropped_selections(case_.group, inputs_[r]), r, "num_dropped");
    }
  }

  // Whether row i has to be as the reference says, or else untouched. Layout expert leaves gaps.
  bool is_written(const ref::RankReceived& want, std::size_t i) const {
    return want.recv_src[i * 2] >= 0 || case_.mark_unused || case_.group.layout == ref::Layout::kPacked;
  }

  void check_rows(std::uint32_t r, const char* what, const std::vector<std::uint8_t>& got,
                  const std::vector<std::uint8_t>& want, std::size_t row_bytes) {
    const ref::RankReceived& received = expected_[r];
    for (std::size_t i = 0; i < received.num_rows; ++i) {
      const auto same = [&](auto byte_of) {
        for (std::size_t b = 0; b < row_bytes; ++b) {
          if (got[i * row_bytes + b] != byte_of(b)) return false;
        }
        return true;
      };
      if (received.recv_src[i * 2] >= 0) {
        if (!same([&](std::size_t b) { return want[i * row_bytes + b]; })) {
          std::printf("  rank %u: %s row %zu of %u differs\n", r, what, i, received.num_rows);
          good_ = false;
          return;
        }
      } else {
        const bool zeroed = is_written(received, i) && case_.zero_padding;
        expect(same([&](std::size_t) { return zeroed ? 0 : kPoison; }), r, "an unfilled row");
      }
    }
  }

  // Stored by the dispatch that made the routing; as it was after any other operation.
  void check_head(std::uint32_t r) {
    const auto head = get<abi::RoutingRecord>(world_->rank(r).head, 1);
    expect(std::memcmp(head.data(), &heads_[r], sizeof(heads_[r])) == 0, r, "the routing's head");
  }

  void check_dispatch(std::uint32_t r) {
    if (world_->masked(r)) return;
    check_head(r);
    const Rank& rank = world_->rank(r);
    const auto& s = world_->shape();
    const ref::RankReceived& want = expected_[r];
    const std::size_t choices = s.per_expert ? 1 : s.topk;
    check_rows(r, "recv_x", get<std::uint8_t>(rank.peer.target.recv_x, want.recv_x.size()), want.recv_x,
               s.format.row_bytes);
    const auto scales = get<std::uint8_t>(rank.peer.target.recv_scales, s.format.scales_bytes(s.recv_rows));
    check_rows(r, "recv_scales", ref::scales_by_row(case_.group, s.recv_rows, scales.data()),
               want.recv_scales, s.format.scale_bytes);
    const auto indices = get_indices(rank.peer.target.recv_topk_idx, s.recv_rows * choices, s.index64);
    const auto weights = get<std::uint32_t>(rank.peer.target.recv_topk_weights, s.recv_rows * choices);
    const auto src = get<std::int32_t>(rank.peer.target.recv_src, s.recv_rows * 2);
    for (std::size_t i = 0; i < s.recv_rows; ++i) {
      const bool exists = i < want.num_rows;
      const bool written = exists ? is_written(want, i) : case_.mark_unused;
      for (int j = 0; j < 2; ++j) {
        const std::int32_t value = !written ? static_cast<std::int32_t>(kPoison32)
                                   : exists ? want.recv_src[i * 2 + j]
                                            : -1;
        expect(src[i * 2 + j] == value, r, "recv_src");
      }
      for (std::size_t k = 0; k < choices && good_; ++k) {
        const std::size_t at = i * choices + k;
        const std::uint32_t weight = !written ? kPoison32
                                     : exists ? std::bit_cast<std::uint32_t>(want.recv_topk_weights[at])
                                              : 0u;
        expect(weights[at] == weight, r, "recv_topk_weights");
        const std::int64_t none =
            s.index64 ? static_cast<std::int64_t>(0xcdcdcdcdcdcdcdcd) : static_cast<std::int32_t>(kPoison32);
        expect(indices[at] == (!written ? none : exists ? want.recv_topk_idx[at] : -1), r, "recv_topk_idx");
      }
    }
    const auto same = [](const std::int32_t* from, const std::vector<std::int32_t>& values) {
      return get<std::int32_t>(from, values.size()) == values;
    };
    expect(same(rank.counts.rank_offsets, want.rank_offsets), r, "rank_offsets");
    expect(same(rank.counts.expert_counts, want.expert_counts), r, "expert_counts");
    expect(same(rank.counts.expert_offsets, want.expert_offsets), r, "expert_offsets");
    expect(same(rank.counts.source_ranges, want.source_ranges), r, "source_ranges");
    check_told(r);
  }

  void check_told(std::uint32_t r) {
    const auto& s = world_->shape();
    const ref::RankReceived& want = expected_[r];
    const std::vector<std::int32_t> words = world_->host_counts(r, last_tag_);
    expect(words.size() == num_placement_words(s), r, "what the CPU is told");
    expect(world_->host_sent(r, last_tag_), r, "the word for the CPU that all has been sent");
    if (words.empty()) return;
    const auto is_at = [&](std::size_t first, const std::vector<std::int32_t>& values) {
      return first + values.size() <= words.size() &&
             std::equal(values.begin(), values.end(), words.begin() + static_cast<std::ptrdiff_t>(first));
    };
    const std::size_t rank_offsets = s.per_expert ? s.num_experts : s.num_ranks;
    const std::size_t expert_counts = rank_offsets + s.num_ranks + 1;
    expect(is_at(rank_offsets, want.rank_offsets), r, "rank_offsets for the CPU");
    expect(is_at(expert_counts, want.expert_counts), r, "expert_counts for the CPU");
    if (s.per_expert)
      expect(is_at(expert_counts + want.expert_counts.size(), want.expert_offsets), r,
             "expert_offsets for the CPU");
    const abi::CallEnd& end = world_->rank(r).calls->end();
    expect(end.ending == abi::CallEnding::kCarriedOut && end.num_recv_rows == want.num_recv_rows, r,
           "the call's result");
    expect(end.num_dropped == world_->result(r).num_dropped, r, "num_dropped of the call");
  }

  void combine() {
    const auto& s = world_->shape();
    const std::size_t choices = s.per_expert ? 1 : s.topk;
    std::vector<ref::CombineInput> answers(world_->size());
    const bool weighted = case_.weighted;
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      Rank& rank = world_->rank(r);
      answers[r].y = random_bf16s(random_, std::size_t{expected_[r].num_rows} * s.hidden);
      if (weighted) test::spoil_left_out_rows(case_.group, inputs_, expected_[r], r, answers[r].y);
      put(rank.y, answers[r].y.data(), answers[r].y.size() * 2);
      answers[r].y_weights = random_floats(random_, expected_[r].num_rows * choices);
      put(rank.y_weights, answers[r].y_weights.data(), answers[r].y_weights.size() * 4);
      for (std::uint32_t b = 0; b < case_.biases; ++b) {
        answers[r].bias[b] = random_bf16s(random_, std::size_t{rank.num_tokens} * s.hidden);
        put(rank.bias[b], answers[r].bias[b].data(), answers[r].bias[b].size() * 2);
      }
      EPD_CUDA(cudaSetDevice(rank.device));
      EPD_CUDA(cudaMemset(rank.out, kPoison, std::size_t{rank.num_tokens} * s.hidden * 2));
      EPD_CUDA(cudaMemset(rank.out_weights, kPoison, std::size_t{rank.num_tokens} * s.topk * 4));
    }
    const std::uint64_t tag = world_->next_tag();
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      if (world_->masked(r)) continue;
      Rank& rank = world_->rank(r);
      Operation op = world_->operation(r, tag, 2);
      op.topk_weights = weighted ? rank.topk_weights : nullptr;
      for (std::uint32_t b = 0; b < case_.biases; ++b) op.bias[b] = rank.bias[b];
      op.out_weights = case_.return_weights != abi::kReturnNone ? rank.out_weights : nullptr;
      op.sum_weights = case_.return_weights == abi::kReturnSum;
      world_->start(Kind::kCombine, op, case_.sms, case_.stages);
    }
    world_->wait();
    for (std::uint32_t r = 0; r < world_->size(); ++r) check_combine(r, answers, tag);
  }

  void check_combine(std::uint32_t r, const std::vector<ref::CombineInput>& answers, std::uint64_t tag) {
    if (world_->masked(r)) return;
    check_head(r);
    const Rank& rank = world_->rank(r);
    const OpResult result = world_->result(r);
    expect(result.error == kernels::OpError::kNone && result.tag == tag, r, "combine's result");
    const ref::RankCombined want =
        ref::combine_to(case_.group, inputs_, answers, {case_.weighted, case_.return_weights}, r);
    expect(get<std::uint16_t>(rank.out, want.out.size()) == want.out, r, "out");
    const auto weights = get<std::uint32_t>(rank.out_weights, want.out_weights.size());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      expect(weights[i] == std::bit_cast<std::uint32_t>(want.out_weights[i]), r, "out_weights");
    }
  }

  Case case_;
  Random& random_;
  std::vector<ref::RankInput> inputs_;
  std::vector<ref::RankReceived> expected_;
  std::unique_ptr<World> world_;
  std::vector<abi::RoutingRecord> heads_;  // as they have to be
  std::uint64_t last_tag_ = 0;
  bool good_ = true;
};

Case plain_case(std::uint32_t ranks, std::uint32_t tokens) {
  Case c;
  c.group.num_ranks = ranks;
  c.group.num_experts = ranks * 4;
  c.group.hidden = 256;
  c.group.topk = 4;
  c.tokens.assign(ranks, tokens);
  c.sms = 8;
  return c;
}

// Failures have to end, with the right words.
class FailureRun {
 public:
  // `inboxes` 0: rows are pushed to their places.
  explicit FailureRun(std::uint32_t inboxes, std::uint64_t room = 4096) {
    Case c = plain_case(2, 16);
    if (inboxes != 0) c.group.layout = ref::Layout::kPacked;
    world_ =
        std::make_unique<World>(WorldShape{shape_of(c, room), 16, {}, inboxes != 0, std::max(inboxes, 1u)});
    for (std::uint32_t r = 0; r < 2; ++r) {
      Rank& rank = world_->rank(r);
      rank.num_tokens = 16;
      std::vector<std::int64_t> choices(64);
      for (std::size_t i = 0; i < choices.size(); ++i) choices[i] = static_cast<std::int64_t>(i % 8);
      put(rank.topk_idx, choices.data(), choices.size() * 8);
    }
  }
  World& world() { return *world_; }

  // Starts a dispatch of each rank in `ranks`; each may differ by `what`.
  OpResult run(std::initializer_list<std::uint32_t> ranks, std::uint64_t timeout_ns, bool differ = false) {
    for (std::uint32_t r = 0; r < 2; ++r) {
      EPD_CUDA(cudaSetDevice(world_->rank(r).device));
      EPD_CUDA(cudaMemset(world_->rank(r).head, kPoison, sizeof(abi::RoutingRecord)));
    }
    tag = world_->next_tag();
    for (const std::uint32_t r : ranks) {
      Operation op = world_->operation(r, tag, differ ? r : 0);
      op.routing.head = world_->rank(r).head;
      op.timeout_ns = timeout_ns;
      world_->start(Kind::kDispatch, op, 8);
    }
    if (abort_after_start) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      world_->abort(0, 1);
    }
    world_->wait();
    const OpResult result = world_->result(0);
    check_head(result);
    world_->abort(0, 0);
    return result;
  }
  std::uint64_t tag = 0;
  bool abort_after_start = false;
  bool heads_good = true;  // stored by a dispatch that succeeds, no routing's after one that fails
  bool ends_good = true;   // of a failure: the client's word written, and all has been left

 private:
  void check_head(const OpResult& result) {
    const auto words = get<std::uint32_t>(world_->rank(0).head, sizeof(abi::RoutingRecord) / 4);
    const auto untouched = [](std::uint32_t word) { return word == kPoison32; };
    ends_good &= world_->good() && world_->rank(0).calls->told();
    const auto handle = static_cast<std::uint32_t>(tag);
    if (result.error == kernels::OpError::kNone) {
      heads_good &= words[0] == handle && words[1] == 0;
    } else {
      heads_good &= words[0] == 0 && words[1] == 0 && std::all_of(words.begin() + 2, words.end(), untouched);
      ends_good &= result.left == tag;
    }
  }

  std::unique_ptr<World> world_;
};

int check(const char* name, bool good) {
  std::printf("%-40s %s\n", name, good ? "PASS" : "FAIL");
  return good ? 0 : 1;
}

// Rows arrive at either rank from 8 tokens of each; through inboxes (layout packed) 4 from each of these.
int run_failures(std::uint32_t inboxes) {
  using kernels::OpError;
  std::printf("%u inboxes:\n", inboxes);
  const std::uint64_t rows = inboxes != 0 ? 64 : 16;
  int failed = 0;
  FailureRun f(inboxes);
  const std::int64_t bad = 8;
  put(static_cast<std::int64_t*>(f.world().rank(0).topk_idx) + 5 * 4 + 2, &bad, 8);
  OpResult r = f.run({0}, 2'000'000'000);
  failed += check("a bad choice is refused", r.error == OpError::kBadChoice && r.token == 5 && r.k == 2 &&
                                                 r.value == 8 && r.tag == f.tag);
  const std::int64_t good = 6;
  put(static_cast<std::int64_t*>(f.world().rank(0).topk_idx) + 5 * 4 + 2, &good, 8);
  r = f.run({0}, 20'000'000);
  failed += check("a missing rank ends in the deadline", r.error == OpError::kDeadline && r.failed_rank == 1);
  f.abort_after_start = true;
  r = f.run({0}, 5'000'000'000);
  failed += check("the abort word ends a wait", r.error == OpError::kAborted && r.failed_rank == 1);
  f.abort_after_start = false;
  r = f.run({0, 1}, 2'000'000'000, true);
  failed += check("different operations are noticed", r.error == OpError::kMismatch && r.failed_rank == 1);
  r = f.run({0, 1}, 2'000'000'000);
  failed +=
      check("after failures the next operation runs", r.error == OpError::kNone && r.num_recv_rows == rows);
  FailureRun small(inboxes, rows - 1);
  r = small.run({0, 1}, 2'000'000'000);
  failed += check("too little room is refused",
                  r.error == OpError::kNoRoom && r.rows == rows && r.room == rows - 1 && r.expert == -1);
  failed += check("failures leave no routing's head", f.heads_good && small.heads_good);
  failed += check("failures let the client's stream go on", f.ends_good && small.ends_good);
  return failed;
}

// Returns only if nothing stops it.
int run_out_of_range() {
  enable_peers();
  FailureRun f(0);
  f.run({0, 1}, 2'000'000'000);
  const std::int32_t row = 1 << 20;
  put(f.world().rank(0).routing.rows, &row, sizeof(row));
  const std::uint64_t tag = f.world().next_tag();
  for (std::uint32_t r = 0; r < f.world().size(); ++r) {
    Operation op = f.world().operation(r, tag, 2);
    f.world().start(Kind::kCombine, op, 8);
  }
  f.world().wait();
  std::printf("FAIL: a row that does not exist was taken\n");
  return 1;
}

int run(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "out-of-range") return run_out_of_range();
  const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  const auto max_hidden = static_cast<std::uint32_t>(argc > 3 ? std::atoi(argv[3]) : 7168);
  std::printf("kernels_test: %d cases, seed %llu, %d GPUs\n", cases, static_cast<unsigned long long>(seed),
              num_devices());
  enable_peers();
  const auto leaves_out = [&](const char* what) {
    return std::any_of(argv + std::min(argc, 4), argv + argc,
                       [&](const char* each) { return std::string(each) == what; });
  };
  int failed = 0;
  if (!leaves_out("no-failures")) {
    for (const std::uint32_t inboxes : {0u, 1u, 2u}) failed += run_failures(inboxes);
  }
  for (int i = 0; i < cases; ++i) {
    Random random(seed + static_cast<std::uint64_t>(i));
    Case c = random_case(random, max_hidden);
    if (leaves_out("no-inboxes")) c.inbox = false;
    if (CaseRun(c, random).run()) continue;
    std::printf("FAIL case %d (seed %llu): %s\n", i, static_cast<unsigned long long>(seed + i),
                c.text().c_str());
    if (++failed > 20) break;
  }
  std::printf("%s: %d cases, %d failed\n", failed == 0 ? "PASS" : "FAIL", cases, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace epd::gpu_test

int main(int argc, char** argv) {
  return epd::gpu_test::run(argc, argv);
}
