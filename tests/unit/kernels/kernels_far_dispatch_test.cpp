// Rows for other nodes: dispatch to near ranks, and packing and forwarding to far ones, against the
// reference: bit for bit, with outputs poisoned first and canaries around them.
#include "kernels_far_cases.h"
#include "kernels_received.h"

#include <cstring>
#include <limits>
#include <optional>

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::RankInput;

// The counts as the ranks of one node know them: of sources there all, of others what they announce to it.
class NodeCounts {
 public:
  NodeCounts(const FarCase& far, std::uint32_t node) : far_(far), ranks_(far.c.params.num_ranks) {
    const std::vector<std::uint32_t> here = far.ranks_of(node);
    rank_counts_.assign(ranks_, std::vector<std::uint32_t>(ranks_, kStale));
    expert_counts_.assign(ranks_, std::vector<std::uint32_t>(far.c.params.num_experts, kStale));
    for (std::uint32_t s = 0; s < ranks_; ++s) {
      if (!far.is_there(s)) continue;
      const RoutingPlan& plan = far.c.plans[s];
      if (far.is_near(s, node)) {
        rank_counts_[s] = plan.rank_counts;
        expert_counts_[s] = plan.expert_counts;
        continue;
      }
      std::vector<std::byte> body(num_far_counts(far.shape(), here.size()) * 4 + 3);
      gather_far_counts(far.shape(), plan, here, body.data() + 3);
      EXPECT_FALSE(scatter_far_counts(far.shape(), body.data() + 3, far.c.inputs[s].num_tokens, here,
                                      rank_counts_[s].data(), expert_counts_[s].data()));
    }
  }

  // The placement of `rank`, and the places of all far sources at this node.
  void place(std::uint32_t rank, std::uint32_t node, Placement& placement,
             std::vector<SourcePlaces>& others) const {
    std::vector<const std::uint32_t*> rows(ranks_, nullptr);
    std::vector<const std::uint32_t*> experts(ranks_, nullptr);
    const auto destinations = std::make_unique<std::uint8_t[]>(ranks_);
    for (std::uint32_t s = 0; s < ranks_; ++s) {
      destinations[s] = far_.is_near(s, node) ? 1 : 0;
      if (!far_.is_there(s)) continue;
      rows[s] = rank_counts_[s].data();
      experts[s] = expert_counts_[s].data();
      if (far_.is_near(s, node)) continue;
      others.emplace_back();
      others.back().source = s;
    }
    PlacementRules rules = far_.c.rules;
    rules.destinations = {destinations.get(), ranks_};
    RowPlacer placer(rules, {rows, experts}, rank, placement, others);
    while (!placer.advance(2)) {
    }
    ASSERT_FALSE(placer.error().bad);
  }

 private:
  static constexpr std::uint32_t kStale = 0xfffffff0;  // of ranks that are not on this node

  const FarCase& far_;
  std::uint32_t ranks_;
  std::vector<std::vector<std::uint32_t>> rank_counts_;
  std::vector<std::vector<std::uint32_t>> expert_counts_;
};

std::vector<std::int32_t> vector_of(std::span<const std::int32_t> section) {
  return {section.begin(), section.end()};
}

// Selects the bases at the ranks of a node from the whole group's.
std::vector<std::int32_t> at_node(const FarCase& far, std::uint32_t node,
                                  std::span<const std::int32_t> base) {
  std::vector<std::int32_t> there;
  const std::size_t targets = base.size() / far.c.params.num_ranks;
  for (std::size_t i = 0; i < base.size(); ++i)
    there.push_back(far.is_near(static_cast<std::uint32_t>(i / targets), node) ? base[i] : 0);
  return there;
}

// Each node knows what it must, and places rows as a group on one node does.
TEST(FarPlaces, EqualThoseOfOneNode) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    const FarCase far = random_far_case(seed, &host::best_row_kernels());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    for (std::uint32_t node = 0; node < far.num_nodes; ++node) {
      const NodeCounts counts(far, node);
      for (const std::uint32_t rank : far.ranks_of(node)) {
        Placement placement;
        std::vector<SourcePlaces> others;
        ASSERT_NO_FATAL_FAILURE(counts.place(rank, node, placement, others));
        const Placement& whole = far.c.placements[rank];
        ASSERT_EQ(vector_of(placement.base()), at_node(far, node, whole.base()));
        ASSERT_EQ(vector_of(placement.words().subspan(placement.base().size())),
                  vector_of(whole.words().subspan(whole.base().size())));
        ASSERT_EQ(placement.num_recv_rows, whole.num_recv_rows);
        for (const SourcePlaces& other : others) {
          ASSERT_EQ(other.base, at_node(far, node, far.c.placements[other.source].base()));
          const SourcePlaces kept = far.places(other.source, node);
          ASSERT_EQ(kept.base, other.base);
          ASSERT_EQ(kept.counts, other.counts);
        }
      }
    }
  }
}

// The room of a far rank is its own node's affair.
TEST(FarPlaces, RoomIsJudgedAtTheDestinationsOnly) {
  for (const bool per_expert : {false, true}) {
    for (const bool blocks : {false, true}) {
      PlacementRules rules;
      rules.num_ranks = rules.num_experts = 2;
      rules.per_expert = per_expert;
      rules.expert_blocks = per_expert && blocks;
      rules.expert_capacity = rules.recv_rows = 3;
      const std::uint32_t counts[2][2] = {{2, 9}, {1, 0}};
      const std::uint32_t* const rows[] = {counts[0], counts[1]};
      Placement placement;
      EXPECT_TRUE(place_rows(rules, {rows, rows}, 0, placement).bad);
      const std::uint8_t destinations[] = {1, 0};
      rules.destinations = destinations;
      EXPECT_FALSE(place_rows(rules, {rows, rows}, 0, placement).bad);
      rules.recv_rows = rules.expert_capacity = 2;
      EXPECT_TRUE(place_rows(rules, {rows, rows}, 0, placement).bad);
    }
  }
}

FarPackArgs pack_args(const FarCase& far, std::uint32_t source, std::uint32_t node, FarNodes nodes,
                      std::span<const std::uint32_t> tokens) {
  const RankInput& input = far.c.inputs[source];
  FarPackArgs args;
  args.shape = far.shape();
  args.plan = &far.c.plans[source];
  args.nodes = nodes;
  args.node = node;
  args.tokens = tokens;
  args.x = input.x.data();
  args.x_scales = input.x_scales.empty() ? nullptr : input.x_scales.data();
  args.topk_weights = input.topk_weights.empty() ? nullptr : input.topk_weights.data();
  return args;
}

// The records of all tokens of `source` that go to `node`.
std::vector<std::byte> packed(const FarCase& far, std::uint32_t source, std::uint32_t node,
                              std::span<const std::uint32_t> tokens, int poison = 0) {
  const std::vector<std::uint32_t> nodes = far.nodes_seen_from(far.node_of_rank[source]);
  const FarPackArgs args = pack_args(far, source, node, nodes, tokens);
  const std::size_t stride = args.shape.row_stride();
  Guarded records(tokens.size() * stride, 16 * (far.c.shift / 16));
  std::memset(records.as<std::byte>(), poison, tokens.size() * stride);
  split(far.c.threads, static_cast<std::uint32_t>(tokens.size()),
        [&](std::uint32_t begin, std::uint32_t end) {
          host::pack_rows_with(far.c.choice, args, begin, end, records.as<std::byte>() + begin * stride);
        });
  records.expect_intact("records");
  return {records.as<std::byte>(), records.as<std::byte>() + tokens.size() * stride};
}

// A gateway that forwards rows of one source at one node.
struct Gateway {
  Gateway(const FarCase& far, std::uint32_t source, std::uint32_t node, std::vector<Received>& received)
      : places(far.places(source, node)), targets(far.c.params.num_ranks) {
    for (const std::uint32_t d : far.ranks_of(node)) targets[d] = received[d].target();
    args.shape = far.shape();
    args.targets = targets;
    args.places = &places;
    args.num_tokens = far.c.inputs[source].num_tokens;
  }
  SourcePlaces places;
  std::vector<DispatchTarget> targets;
  FarForwardArgs args;
};

// In batches, which come in any order.
void forward_batches(std::mt19937& random, const FarCase& far, const FarForwardArgs& args,
                     const std::vector<std::byte>& records) {
  const std::size_t stride = args.shape.row_stride();
  const std::size_t of_batch = between(random, 1, 5);
  std::vector<std::size_t> firsts;
  for (std::size_t first = 0; first < records.size() / stride; first += of_batch) firsts.push_back(first);
  std::shuffle(firsts.begin(), firsts.end(), random);
  for (const std::size_t first : firsts) {
    const std::size_t count = std::min(of_batch, records.size() / stride - first);
    Unaligned body(random, records.data() + first * stride, count * stride);
    split(far.c.threads, static_cast<std::uint32_t>(count), [&](std::uint32_t begin, std::uint32_t end) {
      EXPECT_FALSE(host::forward_rows_with(far.c.choice, args, body.data(), begin, end));
    });
  }
}

void expect_list(const FarCase& far, std::uint32_t source, std::uint32_t node,
                 const PlanArray<std::uint32_t>& list) {
  std::vector<std::uint32_t> expected;
  for (std::uint32_t token = 0; token < far.c.inputs[source].num_tokens; ++token) {
    const std::vector<std::int64_t> choices = far.choices_on(node, source, token);
    const bool there = std::any_of(choices.begin(), choices.end(), [](std::int64_t e) { return e >= 0; });
    if (there && node != far.node_of_rank[source]) expected.push_back(token);
  }
  ASSERT_EQ(std::vector<std::uint32_t>(list.begin(), list.end()), expected);
}

void dispatch_near(const FarCase& far, std::uint32_t source, std::vector<Received>& received) {
  const Case& c = far.c;
  const RankInput& input = c.inputs[source];
  std::vector<DispatchTarget> targets(c.params.num_ranks);
  for (const std::uint32_t d : far.ranks_of(far.node_of_rank[source])) targets[d] = received[d].target();
  const std::vector<std::int32_t> base = at_node(far, far.node_of_rank[source], c.placements[source].base());
  DispatchArgs args;
  args.plan = &c.plans[source];
  args.base = base;
  args.x = input.x.data();
  args.x_scales = input.x_scales.empty() ? nullptr : input.x_scales.data();
  args.topk_weights = input.topk_weights.empty() ? nullptr : input.topk_weights.data();
  args.targets = targets;
  args.format = c.format();
  args.source_rank = source;
  args.topk = c.params.topk;
  args.experts_per_rank = c.experts_per_rank();
  args.index64 = c.index64;
  host::dispatch_rows_with(c.choice, args, 0, input.num_tokens);
}

void dispatch(std::mt19937& random, const FarCase& far, std::vector<Received>& received) {
  for (std::uint32_t s = 0; s < far.c.params.num_ranks; ++s) {
    if (!far.is_there(s)) continue;
    dispatch_near(far, s, received);
    const std::vector<PlanArray<std::uint32_t>> lists = far.lists(s, between(random, 1, 30));
    for (std::uint32_t node = 0; node < far.num_nodes; ++node) {
      ASSERT_NO_FATAL_FAILURE(expect_list(far, s, node, lists[node]));
      const std::vector<std::byte> records = packed(far, s, node, lists[node]);
      ASSERT_EQ(records, packed(far, s, node, lists[node], 0xee)) << "not every byte is written";
      forward_batches(random, far, Gateway(far, s, node, received).args, records);
    }
  }
}

void expect_dispatched(std::uint32_t seed, const FarCase& far) {
  std::mt19937 random(seed);
  std::vector<Received> received = poisoned(far.c);
  ASSERT_NO_FATAL_FAILURE(dispatch(random, far, received));
  for (std::uint32_t d = 0; d < far.c.params.num_ranks; ++d) {
    if (!far.is_there(d)) continue;
    SCOPED_TRACE(testing::Message() << "destination " << d);
    ASSERT_NO_FATAL_FAILURE(
        expect_received(far.c, received[d], reference::dispatch_to(far.c.params, far.c.inputs, d)));
  }
}

class FarDispatch : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(FarDispatch, EqualsReference) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    const FarCase far = random_far_case(seed, GetParam());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    expect_dispatched(seed, far);
    if (HasFailure()) return;
  }
}

// A rank that is lost after the routing was made: the others receive what they would have received.
TEST_P(FarDispatch, SkipsARankThatIsNotThere) {
  for (std::uint32_t seed = 5000; seed < 5100; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    far.lost = seed % far.c.params.num_ranks;
    far.c.inputs[far.lost].num_tokens = 0;
    far.c.params.masked.clear();
    route(far.c);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    expect_dispatched(seed, far);
    if (HasFailure()) return;
  }
}

// ---- what is refused

// The records for one node of a source that has some; `received` shows what is stored.
struct Sample {
  FarCase far;
  std::uint32_t source = 0;
  std::uint32_t node = 0;
  std::vector<std::byte> records;

  std::size_t stride() const { return far.shape().row_stride(); }
  std::uint32_t count() const { return static_cast<std::uint32_t>(records.size() / stride()); }
  std::byte* choices(std::uint32_t record) {
    const RowFormat format = far.c.format();
    return records.data() + record * stride() + format.row_bytes + format.scale_bytes;
  }
  abi::FarChoice choice(std::uint32_t record, std::uint32_t k) {
    return host::read_far<abi::FarChoice>(choices(record) + k * sizeof(abi::FarChoice));
  }
  void set(std::uint32_t record, std::uint32_t k, const abi::FarChoice& choice) {
    std::memcpy(choices(record) + k * sizeof(choice), &choice, sizeof(choice));
  }
  std::uint32_t first_choice(std::uint32_t record) {
    std::uint32_t k = 0;
    while (choice(record, k).expert < 0) ++k;
    return k;
  }
};

// None if no source has at least two tokens for another node.
std::optional<Sample> random_sample(std::uint32_t seed, bool crc = false) {
  Sample sample;
  sample.far = random_far_case(seed, &host::best_row_kernels());
  sample.far.crc = crc;
  const std::uint32_t ranks = sample.far.c.params.num_ranks;
  for (std::uint32_t i = 0; i < ranks * sample.far.num_nodes; ++i) {
    sample.source = (seed + i) % ranks;
    sample.node = i / ranks;
    if (!sample.far.is_there(sample.source)) continue;
    const auto lists = sample.far.lists(sample.source, 10);
    if (lists[sample.node].size() < 2) continue;
    sample.records = packed(sample.far, sample.source, sample.node, lists[sample.node]);
    return sample;
  }
  return {};
}

// Forwarding comes as far as `bad` and stores nothing of that record.
void expect_refused(Sample sample, std::uint32_t bad, FarField field, std::uint32_t index, std::int64_t value,
                    const std::byte* was) {
  SCOPED_TRACE(far_field_name(field));
  std::mt19937 random(bad);
  std::vector<Received> received = poisoned(sample.far.c);
  std::vector<Received> expected = poisoned(sample.far.c);
  const Gateway gateway(sample.far, sample.source, sample.node, received);
  const Gateway good(sample.far, sample.source, sample.node, expected);
  Unaligned body(random, sample.records.data(), sample.records.size());
  const FarFault fault = forward_rows(gateway.args, body.data(), 0, sample.count());
  EXPECT_EQ(fault.field, field);
  EXPECT_EQ(fault.record, bad);
  EXPECT_EQ(fault.index, index);
  EXPECT_EQ(fault.value, value);
  std::copy_n(was, sample.stride(),
              sample.records.begin() + static_cast<std::ptrdiff_t>(bad * sample.stride()));
  EXPECT_FALSE(forward_rows(good.args, sample.records.data(), 0, bad));
  for (std::uint32_t d = 0; d < sample.far.c.params.num_ranks; ++d) {
    received[d].expect_intact();
    const auto same = [](const Guarded& a, const Guarded& b, std::size_t bytes) {
      return std::memcmp(a.as<std::byte>(), b.as<std::byte>(), bytes) == 0;
    };
    const std::size_t rows = received[d].rows;
    EXPECT_TRUE(same(received[d].x, expected[d].x, rows * sample.far.c.format().row_bytes));
    EXPECT_TRUE(same(received[d].scales, expected[d].scales, sample.far.c.format().scales_bytes(rows)));
    EXPECT_TRUE(same(received[d].topk_idx, expected[d].topk_idx,
                     rows * sample.far.c.choices_per_row() * (sample.far.c.index64 ? 8 : 4)));
    EXPECT_TRUE(
        same(received[d].topk_weights, expected[d].topk_weights, rows * sample.far.c.choices_per_row() * 4));
    EXPECT_TRUE(same(received[d].src, expected[d].src, rows * 8));
  }
}

TEST(FarRecords, EveryFieldOfARecordIsJudged) {
  std::uint32_t samples = 0;
  std::uint32_t two_at_a_rank = 0;
  for (std::uint32_t seed = 9000; seed < 9150; ++seed) {
    std::optional<Sample> found = random_sample(seed);
    if (!found) continue;
    ++samples;
    Sample& sample = *found;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << sample.far);
    const FarShape shape = sample.far.shape();
    const std::uint32_t bad = seed % sample.count();
    const std::vector<std::byte> was(
        sample.records.begin() + static_cast<std::ptrdiff_t>(bad * sample.stride()),
        sample.records.begin() + static_cast<std::ptrdiff_t>((bad + 1) * sample.stride()));
    const std::uint32_t k = sample.first_choice(bad);
    const abi::FarChoice good = sample.choice(bad, k);
    const auto with = [&](std::int32_t expert, std::uint32_t position) {
      Sample changed = sample;
      changed.set(bad, k, {expert, position, good.weight});
      return changed;
    };
    std::vector<std::int32_t> experts = {-2, static_cast<std::int32_t>(shape.num_experts()),
                                         std::numeric_limits<std::int32_t>::min(),
                                         std::numeric_limits<std::int32_t>::max()};
    for (std::uint32_t r = 0; r < shape.num_ranks; ++r) {  // of other nodes, and masked ones
      if (!sample.far.is_near(r, sample.node))
        experts.push_back(static_cast<std::int32_t>(r * shape.experts_per_rank));
    }
    for (const std::int32_t expert : experts)
      expect_refused(with(expert, good.position), bad, FarField::kExpert, k, expert, was.data());
    const auto expert = static_cast<std::uint32_t>(good.expert);
    const std::uint32_t target = shape.per_expert ? expert : expert / shape.experts_per_rank;
    for (const std::uint32_t past :
         {sample.far.places(sample.source, sample.node).counts[target], 0xffffffffu}) {
      expect_refused(with(good.expert, past), bad, FarField::kPosition, k, past, was.data());
    }
    for (const std::uint32_t token : {sample.far.c.inputs[sample.source].num_tokens, 0xffffffffu}) {
      Sample changed = sample;
      std::memcpy(changed.choices(bad) + shape.topk * sizeof(abi::FarChoice), &token, 4);
      expect_refused(changed, bad, FarField::kToken, 0, token, was.data());
    }
    Sample empty = sample;
    for (std::uint32_t i = 0; i < shape.topk; ++i) empty.set(bad, i, {-1, 0, 0.0f});
    expect_refused(empty, bad, FarField::kExpert, 0, -1, was.data());
    if (!shape.per_expert && k + 1 < shape.topk && good.position > 0) {
      Sample changed = sample;
      changed.set(bad, k + 1, {good.expert, good.position - 1, 0.0f});
      expect_refused(changed, bad, FarField::kPosition, k + 1, good.position - 1, was.data());
      ++two_at_a_rank;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 20u);
  EXPECT_GT(two_at_a_rank, 5u);
}

TEST(FarRecords, NoFlippedBitPasses) {
  std::uint32_t samples = 0;
  for (std::uint32_t seed = 9000; seed < 9060; ++seed) {
    std::optional<Sample> sample = random_sample(seed, true);
    if (!sample) continue;
    ++samples;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << sample->far);
    std::mt19937 random(seed);
    const std::uint32_t bad = seed % sample->count();
    const std::size_t first = bad * sample->stride();
    const std::vector<std::byte> records = sample->records;
    for (int i = 0; i < 10; ++i) {
      const std::size_t byte = between(random, 0, static_cast<std::uint32_t>(sample->stride() - 1));
      sample->records[first + byte] ^= std::byte(1u << i % 8);
      expect_refused(*sample, bad, FarField::kCrc, 0, 0, records.data() + first);
      sample->records = records;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 10u);
}

// A record of random bytes stores nothing outside.
TEST(FarRecords, RandomBytesHurtNobody) {
  std::uint32_t refused = 0;
  for (std::uint32_t seed = 9200; seed < 9500; ++seed) {
    std::optional<Sample> sample = random_sample(seed);
    if (!sample) continue;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << sample->far);
    std::mt19937 random(seed);
    std::vector<Received> received = poisoned(sample->far.c);
    const Gateway gateway(sample->far, sample->source, sample->node, received);
    for (std::uint32_t i = 0; i < sample->count(); ++i) {
      std::byte* const first = sample->choices(i);
      const std::size_t bytes = sample->far.c.params.topk * sizeof(abi::FarChoice) + 4;
      const std::uint32_t changes = between(random, 0, 3);
      for (std::uint32_t j = 0; j < changes; ++j)
        first[between(random, 0, static_cast<std::uint32_t>(bytes) - 1)] = static_cast<std::byte>(random());
      Unaligned body(random, sample->records.data() + i * sample->stride(), sample->stride());
      if (forward_rows(gateway.args, body.data(), 0, 1)) ++refused;
    }
    for (const Received& rank : received) rank.expect_intact();
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 100u);
}

// A layout, its counts of two ranks with two experts each, and which is bad; -1: none.
struct Counts {
  bool per_expert;
  std::vector<std::uint32_t> counts;
  int bad;
};

TEST(FarCounts, AreJudgedBeforeTheyAreStored) {
  constexpr std::uint32_t kTokens = 5;
  const std::vector<Counts> all = {
      {false, {5, 0, 15, 0, 0, 0}, -1},       {false, {5, 2, 10, 5, 1, 1}, -1},
      {false, {6, 0, 6, 0, 0, 0}, 0},         {false, {5, 6, 5, 0, 6, 0}, 1},
      {false, {5, 0, 16, 0, 0, 0}, 2},        {false, {5, 1, 10, 6, 1, 0}, 3},
      {false, {5, 1, 2, 2, 1, 0}, 0},         {false, {5, 1, 5, 0, 0, 0}, 1},
      {false, {0, 0, 0, 0, 0, 1}, 5},         {true, {5, 0, 5, 5, 0, 0}, -1},
      {true, {5, 1, 6, 0, 1, 0}, 2},          {true, {5, 1, 5, 0, 1, 2}, 5},
      {true, {5, 1, 5, 0xffffffff, 1, 0}, 3}, {true, {5, 2, 5, 0, 1, 0}, 1},
  };
  FarShape shape;
  shape.num_ranks = 4;
  shape.experts_per_rank = 2;
  shape.topk = 3;
  const std::vector<std::uint32_t> ranks = {1, 3};
  for (const Counts& given : all) {
    SCOPED_TRACE(testing::Message() << given.per_expert << " " << testing::PrintToString(given.counts));
    shape.per_expert = given.per_expert;
    std::vector<std::uint32_t> rank_counts(4, 7);
    std::vector<std::uint32_t> expert_counts(8, 7);
    const FarFault fault = scatter_far_counts(shape, reinterpret_cast<const std::byte*>(given.counts.data()),
                                              kTokens, ranks, rank_counts.data(), expert_counts.data());
    if (given.bad >= 0) {
      EXPECT_EQ(fault.field, FarField::kCount);
      EXPECT_EQ(fault.index, static_cast<std::uint32_t>(given.bad));
      EXPECT_EQ(fault.value, given.counts[static_cast<std::size_t>(given.bad)]);
      EXPECT_EQ(rank_counts, std::vector<std::uint32_t>(4, 7));
      EXPECT_EQ(expert_counts, std::vector<std::uint32_t>(8, 7));
    } else {
      EXPECT_FALSE(fault);
      const std::vector<std::uint32_t>& n = given.counts;
      EXPECT_EQ(rank_counts, (std::vector<std::uint32_t>{7, n[0], 7, n[1]}));
      EXPECT_EQ(expert_counts, (std::vector<std::uint32_t>{7, 7, n[2], n[3], 7, 7, n[4], n[5]}));
    }
  }
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, FarDispatch, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
