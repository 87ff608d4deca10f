// Sums for other nodes: asks, sums of a gateway's node, and merging them with near rows, against the
// reference: bit for bit, with outputs poisoned first and canaries around them.
#include "kernels_answers.h"
#include "kernels_far_cases.h"

#include <cstring>
#include <optional>

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::CombineInput;
using reference::CombineOptions;
using reference::Layout;
using reference::RankCombined;
using reference::RankInput;

// A combine of a group on several nodes.
struct World {
  FarCase far;
  CombineOptions options;
  std::vector<CombineInput> answers;

  World(FarCase group, std::uint32_t seed, const CombineOptions& asked)
      : far(std::move(group)), options(asked), answers(random_answers(far.c, seed, asked)) {}

  // [R] as the ranks of `node` see them.
  std::vector<CombineSource> sources(std::uint32_t node) const {
    std::vector<CombineSource> sources(far.c.params.num_ranks);
    for (const std::uint32_t d : far.ranks_of(node))
      sources[d] = {answers[d].y.data(), options.return_weights ? answers[d].y_weights.data() : nullptr};
    return sources;
  }
  const float* weights(std::uint32_t owner) const {
    return options.weighted ? far.c.inputs[owner].topk_weights.data() : nullptr;
  }
};

// What a gateway needs to serve the asks of one owner.
struct Gateway {
  Gateway(const World& world, std::uint32_t owner, std::uint32_t node)
      : places(world.far.places(owner, node)),
        sources(world.sources(node)),
        whole(world.far.whole_domains()) {
    args.shape = world.far.shape();
    args.sources = sources;
    args.places = &places;
    args.num_tokens = world.far.c.inputs[owner].num_tokens;
    args.sum_ranks = world.far.c.params.sum_ranks;
    args.whole_domains = whole;
    args.weighted = world.options.weighted;
    args.return_weights = world.options.return_weights;
  }
  std::size_t stride() const { return args.shape.sum_stride(args.return_weights); }

  SourcePlaces places;
  std::vector<CombineSource> sources;
  std::vector<std::uint8_t> whole;
  FarSumArgs args;
};

std::vector<std::byte> asks_of(const World& world, std::uint32_t owner, std::uint32_t node,
                               std::span<const std::uint32_t> tokens, int poison = 0) {
  const std::vector<std::uint32_t> nodes = world.far.nodes_seen_from(world.far.node_of_rank[owner]);
  FarAskArgs args;
  args.shape = world.far.shape();
  args.plan = &world.far.c.plans[owner];
  args.nodes = nodes;
  args.node = node;
  args.tokens = tokens;
  args.topk_weights = world.weights(owner);
  const std::size_t stride = args.shape.ask_stride();
  Guarded asks(tokens.size() * stride, 0);
  std::memset(asks.as<std::byte>(), poison, tokens.size() * stride);
  const auto half = static_cast<std::uint32_t>(tokens.size() / 2);
  make_asks(args, 0, half, asks.as<std::byte>());
  make_asks(args, half, static_cast<std::uint32_t>(tokens.size()), asks.as<std::byte>() + half * stride);
  asks.expect_intact("asks");
  return {asks.as<std::byte>(), asks.as<std::byte>() + tokens.size() * stride};
}

// The sums of one node for one owner, in batches.
struct Sums {
  std::vector<Unaligned> bodies;
  std::vector<FarBatch> batches;

  std::uint32_t num_records() const {
    std::uint32_t records = 0;
    for (const FarBatch& batch : batches) records += batch.num_records;
    return records;
  }
};

// Serves all asks, in batches of sums with room for so many records or more.
void serve(std::mt19937& random, const World& world, const Gateway& gateway,
           const std::vector<std::byte>& asks, std::uint32_t least_room, Sums& sums) {
  const auto count = static_cast<std::uint32_t>(asks.size() / gateway.args.shape.ask_stride());
  Unaligned body(random, asks.data(), asks.size());
  for (std::uint32_t done = 0; done < count;) {
    const std::uint32_t room = least_room + between(random, 0, 3);
    const std::uint32_t end = std::min(count, done + between(random, 1, 9));
    Guarded batch(room * gateway.stride(), 0);
    const FarSummed summed = host::sum_rows_for_with(world.far.c.choice, gateway.args, body.data(), done, end,
                                                     batch.as<std::byte>(), room);
    ASSERT_FALSE(summed.fault);
    ASSERT_GT(summed.asks, 0u);
    ASSERT_GE(summed.records, summed.asks);
    ASSERT_LE(summed.records, room);
    const std::size_t bytes = summed.records * gateway.stride();
    batch.expect_intact("sums");
    ASSERT_TRUE(batch.is_poison(bytes, room * gateway.stride()));
    // Twice the same bytes: none is left as it was.
    std::vector<std::byte> again(bytes, std::byte{0x55});
    host::sum_rows_for_with(world.far.c.choice, gateway.args, body.data(), done, done + summed.asks,
                            again.data(), summed.records);
    ASSERT_EQ(std::memcmp(again.data(), batch.as<std::byte>(), bytes), 0);
    sums.bodies.emplace_back(random, batch.as<std::byte>(), bytes);
    sums.batches.push_back({sums.bodies.back().data(), summed.records});
    if (between(random, 0, 9) == 0) sums.batches.push_back({nullptr, 0});
    done += summed.asks;
  }
}

std::vector<Sums> sums_for(std::mt19937& random, const World& world, std::uint32_t owner) {
  const FarCase& far = world.far;
  std::vector<Sums> sums(far.num_nodes);
  const auto lists = far.lists(owner, between(random, 1, 30));
  for (std::uint32_t node = 0; node < far.num_nodes; ++node) {
    const std::vector<std::byte> asks = asks_of(world, owner, node, lists[node]);
    EXPECT_EQ(asks, asks_of(world, owner, node, lists[node], 0xee)) << "not every byte is written";
    const Gateway gateway(world, owner, node);
    const auto ranks = static_cast<std::uint32_t>(far.ranks_of(node).size());
    serve(random, world, gateway, asks, most_far_sums(gateway.args.shape, ranks), sums[node]);
  }
  return sums;
}

// What an owner needs to merge, and where it does.
struct Owner {
  Owner(const World& world, std::uint32_t owner)
      : far(world.far),
        input(far.c.inputs[owner]),
        nodes(far.nodes_seen_from(far.node_of_rank[owner])),
        whole(far.whole_domains()),
        sources(world.sources(far.node_of_rank[owner])),
        out(std::size_t{input.num_tokens} * far.c.params.hidden * 2, far.c.shift),
        out_weights(world.options.return_weights ? input.topk_idx.size() * 4 : 0, far.c.shift) {
    args.nodes = nodes;
    args.whole_domains = whole;
    CombineArgs& near = args.combine;
    near.plan = &far.c.plans[owner];
    near.base = far.c.placements[owner].base();
    near.sources = sources;
    near.topk_weights = world.weights(owner);
    for (std::size_t b = 0; b < 2; ++b) {
      const std::vector<std::uint16_t>& bias = world.answers[owner].bias[b];
      if (!bias.empty()) near.bias[b] = bias.data();
    }
    near.out = out.as<std::uint16_t>();
    near.out_weights = world.options.return_weights ? out_weights.as<float>() : nullptr;
    near.hidden = far.c.params.hidden;
    near.topk = far.c.params.topk;
    near.experts_per_rank = far.c.experts_per_rank();
    near.rank = owner;
    near.sum_ranks = far.c.params.sum_ranks;
  }

  // As batches come, in any order between the nodes.
  void merge_as_they_come(std::mt19937& random, const std::vector<Sums>& sums) {
    std::vector<FarStream> streams(sums.size());
    std::vector<std::size_t> come(sums.size(), 0);
    std::uint32_t done = 0;
    for (std::uint32_t turn = 0; done < input.num_tokens && turn < 10000; ++turn) {
      const std::uint32_t node = between(random, 0, far.num_nodes - 1);
      if (come[node] < sums[node].batches.size()) ++come[node];
      streams[node].batches = std::span(sums[node].batches).first(come[node]);
      const std::uint32_t end = std::min(input.num_tokens, done + between(random, 1, 40));
      std::vector<FarStream> before = streams;
      const FarMerged judged = judge_sums(args, before, done, end);
      const FarMerged merged = host::merge_sums_with(far.c.choice, args, streams, done, end);
      ASSERT_FALSE(judged.fault);
      ASSERT_FALSE(merged.fault);
      ASSERT_EQ(judged.tokens, merged.tokens);
      for (std::size_t n = 0; n < streams.size(); ++n) {
        ASSERT_EQ(before[n].batch, streams[n].batch);
        ASSERT_EQ(before[n].record, streams[n].record);
      }
      done += merged.tokens;
      const std::size_t bytes = std::size_t{done} * far.c.params.hidden * 2;
      ASSERT_TRUE(out.is_poison(bytes, std::size_t{input.num_tokens} * far.c.params.hidden * 2));
    }
    ASSERT_EQ(done, input.num_tokens);
    expect_used(streams, sums);
  }

  // All have come: ranges are cut, and merged by threads.
  void merge_at_once(const std::vector<Sums>& sums, std::uint32_t tokens_of_range) {
    std::vector<FarStream> streams(sums.size());
    for (std::size_t n = 0; n < sums.size(); ++n) streams[n].batches = sums[n].batches;
    std::vector<std::thread> threads;
    for (std::uint32_t begin = 0; begin < input.num_tokens; begin += tokens_of_range) {
      const std::uint32_t end = std::min(input.num_tokens, begin + tokens_of_range);
      threads.emplace_back([this, begin, end, at = streams]() mutable {
        EXPECT_EQ(host::merge_sums_with(far.c.choice, args, at, begin, end).tokens, end - begin);
      });
      EXPECT_EQ(judge_sums(args, streams, begin, end).tokens, end - begin);
    }
    for (std::thread& thread : threads) thread.join();
    expect_used(streams, sums);
  }

  static void expect_used(const std::vector<FarStream>& streams, const std::vector<Sums>& sums) {
    for (std::size_t n = 0; n < sums.size(); ++n) {
      std::uint32_t left = 0;
      for (std::size_t b = streams[n].batch; b < sums[n].batches.size(); ++b)
        left += sums[n].batches[b].num_records;
      EXPECT_EQ(left - streams[n].record, 0u) << "node " << n << " has sent more than is used";
    }
  }

  void expect(const RankCombined& expected) {
    expect_bits("out", out.as<std::uint16_t>(), expected.out);
    expect_bits("out_weights", out_weights.as<float>(), expected.out_weights);
    out.expect_intact("out");
    out_weights.expect_intact("out_weights");
  }

  const FarCase& far;
  const RankInput& input;
  std::vector<std::uint32_t> nodes;
  std::vector<std::uint8_t> whole;
  std::vector<CombineSource> sources;
  Guarded out, out_weights;
  FarMergeArgs args;
};

void expect_combined(std::uint32_t seed, const World& world, const reference::GroupParams& params) {
  std::mt19937 random(seed);
  for (std::uint32_t r = 0; r < world.far.c.params.num_ranks; ++r) {
    if (!world.far.is_there(r)) continue;
    SCOPED_TRACE(testing::Message() << "rank " << r);
    const RankCombined expected =
        reference::combine_to(params, world.far.c.inputs, world.answers, world.options, r);
    const std::vector<Sums> sums = sums_for(random, world, r);
    if (testing::Test::HasFailure()) return;
    Owner one(world, r);
    ASSERT_NO_FATAL_FAILURE(one.merge_as_they_come(random, sums));
    ASSERT_NO_FATAL_FAILURE(one.expect(expected));
    Owner two(world, r);
    two.merge_at_once(sums, between(random, 5, 24));
    ASSERT_NO_FATAL_FAILURE(two.expect(expected));
  }
}

class FarCombine : public testing::TestWithParam<const host::RowKernels*> {};

TEST_P(FarCombine, EqualsReference) {
  for (std::uint32_t seed = 1000; seed < 1400; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    CombineOptions options;
    options.weighted = has_weights(far.c);
    options.return_weights = seed % 3 == 0;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far
                                    << (options.weighted ? " weighted" : ""));
    const World world(std::move(far), seed + 1, options);
    ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, world.far.c.params));
    if (HasFailure()) return;
  }
}

// A rank that is lost after the dispatch: its experts' contribution is zero.
TEST_P(FarCombine, ALostRankContributesNothing) {
  for (std::uint32_t seed = 3000; seed < 3080; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    far.lost = seed % far.c.params.num_ranks;
    far.c.params.masked.clear();
    far.c.inputs[far.lost] = {};  // so that the others' rows lie where they lie without it
    route(far.c);
    const CombineOptions options{has_weights(far.c), true};
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    reference::GroupParams without = far.c.params;
    without.masked.assign(far.c.params.num_ranks, false);
    without.masked[far.lost] = true;
    const World world(std::move(far), seed + 1, options);
    ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, without));
    if (HasFailure()) return;
  }
}

// The same shape on one node, on several, and on as many as there are ranks: the same bits. Many rows for
// each token, so that roundings disagree.
TEST_P(FarCombine, PlacesOfRanksAreNoPartOfTheResult) {
  for (std::uint32_t seed = 2000; seed < 2040; ++seed) {
    FarCase far = random_far_case(seed, GetParam());
    Case& c = far.c;
    c.params.layout = static_cast<Layout>(seed % 3);
    c.params.alignment = 1;
    c.params.topk = 16;
    c.params.masked.clear();
    std::mt19937 random(seed);
    for (RankInput& input : c.inputs) {
      input.topk_idx.clear();
      input.topk_weights.clear();
      for (std::size_t i = 0; i < std::size_t{input.num_tokens} * 16; ++i) {
        input.topk_idx.push_back(between(random, 0, c.params.num_experts - 1));
        input.topk_weights.push_back(random_weight(random, seed % 3));
      }
    }
    route(c);
    const std::uint32_t ranks = c.params.num_ranks;
    for (std::uint32_t nodes = 1; nodes <= ranks; nodes += ranks > 7 ? 23 : 1) {
      far.num_nodes = nodes;
      far.node_of_rank.clear();
      for (std::uint32_t r = 0; r < ranks; ++r) far.node_of_rank.push_back(r * nodes / ranks);
      SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
      const World world(far, seed % 12, {seed % 4 < 2, true});
      ASSERT_NO_FATAL_FAILURE(expect_combined(seed, world, world.far.c.params));
      if (HasFailure()) return;
    }
  }
}

// One record for a token and a domain that is whole, however many ranks it has; else one for each rank.
TEST(FarSums, CrossOnceForAWholeDomain) {
  FarCase far;
  Case& c = far.c;
  c.params.num_ranks = c.params.num_experts = c.params.topk = 6;
  c.choice = {&host::best_row_kernels(), host::Stores::kCached};
  for (std::uint32_t r = 0; r < 6; ++r) {
    RankInput input;
    input.num_tokens = 5;
    input.x.resize(std::size_t{10} * c.params.hidden);
    for (std::uint32_t i = 0; i < 30; ++i) input.topk_idx.push_back(i % 6);
    c.inputs.push_back(input);
  }
  far.num_nodes = 2;
  far.node_of_rank = {0, 0, 0, 1, 1, 1};
  struct Expected {
    std::uint32_t sum_ranks;
    std::uint32_t records;  // for each token of rank 0, from node 1
  };
  for (const Expected& expected : {Expected{0, 3}, {1, 3}, {2, 2}, {3, 1}, {4, 2}, {5, 3}, {6, 3}}) {
    for (const Layout layout : {Layout::kCompact, Layout::kPacked, Layout::kExpert}) {
      c.params.layout = layout;
      c.params.sum_ranks = expected.sum_ranks;
      route(c);
      SCOPED_TRACE(testing::Message() << far);
      std::mt19937 random(1);
      const World world(far, 3, {});
      EXPECT_EQ(sums_for(random, world, 0)[1].num_records(), 5 * expected.records);
    }
  }
}

// ---- what is refused

// The asks of an owner for one node.
struct Sample {
  std::unique_ptr<World> world;
  std::uint32_t owner = 0;
  std::uint32_t node = 0;
  std::vector<std::byte> asks;

  std::size_t stride() const { return world->far.shape().ask_stride(); }
  std::uint32_t count() const { return static_cast<std::uint32_t>(asks.size() / stride()); }
  std::byte* at(std::uint32_t ask) { return asks.data() + ask * stride(); }
  abi::FarAsk head(std::uint32_t ask) { return host::read_far<abi::FarAsk>(at(ask)); }
  std::byte* place(std::uint32_t ask, std::uint32_t i) {
    return at(ask) + sizeof(abi::FarAsk) + i * sizeof(abi::FarAskEntry);
  }
  abi::FarAskEntry entry(std::uint32_t ask, std::uint32_t i) {
    return host::read_far<abi::FarAskEntry>(place(ask, i));
  }
};

// None if no owner has at least two tokens with rows on another node.
std::optional<Sample> random_sample(std::uint32_t seed) {
  FarCase far = random_far_case(seed, &host::best_row_kernels());
  Sample sample;
  const CombineOptions options{has_weights(far.c), seed % 2 == 0};
  sample.world = std::make_unique<World>(std::move(far), seed, options);
  const FarCase& group = sample.world->far;
  for (std::uint32_t i = 0; i < group.c.params.num_ranks * group.num_nodes; ++i) {
    sample.owner = (seed + i) % group.c.params.num_ranks;
    sample.node = i / group.c.params.num_ranks;
    if (!group.is_there(sample.owner)) continue;
    const auto lists = group.lists(sample.owner, 10);
    if (lists[sample.node].size() < 2) continue;
    sample.asks = asks_of(*sample.world, sample.owner, sample.node, lists[sample.node]);
    return sample;
  }
  return {};
}

template <typename T>
void change(Sample& sample, std::byte* place, const T& value, FarFault expected) {
  std::byte was[sizeof(T)];
  std::memcpy(was, place, sizeof(T));
  std::memcpy(place, &value, sizeof(T));
  SCOPED_TRACE(far_field_name(expected.field));
  std::mt19937 random(expected.record);
  const Gateway gateway(*sample.world, sample.owner, sample.node);
  const std::uint32_t room = sample.count() * sample.world->far.c.params.topk;
  Guarded sums(room * gateway.stride(), 0);
  Unaligned body(random, sample.asks.data(), sample.asks.size());
  const FarSummed summed =
      sum_rows_for(gateway.args, body.data(), 0, sample.count(), sums.as<std::byte>(), room);
  EXPECT_EQ(summed.fault.field, expected.field);
  EXPECT_EQ(summed.fault.record, expected.record);
  EXPECT_EQ(summed.fault.index, expected.index);
  EXPECT_EQ(summed.fault.value, expected.value);
  EXPECT_EQ(summed.asks, expected.record);
  sums.expect_intact("sums");
  EXPECT_TRUE(sums.is_poison(summed.records * gateway.stride(), room * gateway.stride()));
  std::memcpy(place, was, sizeof(T));
}

TEST(FarAsks, EveryFieldIsJudged) {
  std::uint32_t samples = 0;
  std::uint32_t descending = 0;
  for (std::uint32_t seed = 9000; seed < 9150; ++seed) {
    std::optional<Sample> found = random_sample(seed);
    if (!found) continue;
    ++samples;
    Sample& sample = *found;
    const FarCase& far = sample.world->far;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << far);
    const FarShape shape = far.shape();
    const std::uint32_t bad = seed % sample.count();
    const abi::FarAsk head = sample.head(bad);
    for (const std::uint32_t token : {far.c.inputs[sample.owner].num_tokens, 0xffffffffu}) {
      change(sample, sample.at(bad), token, {FarField::kToken, bad, 0, token});
    }
    for (const std::uint32_t entries : {0u, shape.topk + 1, 0xffffffffu}) {
      change(sample, sample.at(bad), abi::FarAsk{head.token, entries},
             {FarField::kNumEntries, bad, 0, entries});
    }
    const std::uint32_t i = seed % head.num_entries;
    const abi::FarAskEntry good = sample.entry(bad, i);
    std::vector<std::uint32_t> targets = {shape.num_targets(), 0xffffffff};
    for (std::uint32_t r = 0; r < shape.num_ranks; ++r) {  // of other nodes, and masked ones
      if (!far.is_near(r, sample.node)) targets.push_back(shape.per_expert ? r * shape.experts_per_rank : r);
    }
    const auto entry = [&](std::uint32_t target, std::uint32_t position, std::uint32_t choices) {
      return abi::FarAskEntry{target, position, choices, good.weight};
    };
    for (const std::uint32_t target : targets) {
      change(sample, sample.place(bad, i), entry(target, good.position, good.choices),
             {FarField::kTarget, bad, i, target});
    }
    const std::uint32_t count = far.places(sample.owner, sample.node).counts[good.target];
    for (const std::uint32_t position : {count, 0xffffffffu}) {
      change(sample, sample.place(bad, i), entry(good.target, position, good.choices),
             {FarField::kPosition, bad, i, position});
    }
    for (std::uint32_t k = shape.topk; k < 32; k += 5) {
      const std::uint32_t choices = good.choices | 1u << k;
      change(sample, sample.place(bad, i), entry(good.target, good.position, choices),
             {FarField::kChoices, bad, i, choices});
    }
    // Ranks ascend; layout compact: each is named once.
    for (std::uint32_t j = 1; j < head.num_entries; ++j) {
      const abi::FarAskEntry second = sample.entry(bad, j);
      if (shape.rank_of(sample.entry(bad, j - 1).target) == shape.rank_of(second.target)) continue;
      struct Two {
        abi::FarAskEntry entries[2];
      };
      const Two swapped = {{second, sample.entry(bad, j - 1)}};
      change(sample, sample.place(bad, j - 1), swapped,
             {FarField::kTarget, bad, j, swapped.entries[1].target});
      if (!shape.per_expert) {
        change(sample, sample.place(bad, j - 1), second, {FarField::kTarget, bad, j, second.target});
      }
      ++descending;
      break;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 20u);
  EXPECT_GT(descending, 5u);
}

// Whatever an ask says, nothing is stored outside.
TEST(FarAsks, RandomBytesHurtNobody) {
  std::uint32_t refused = 0;
  for (std::uint32_t seed = 9200; seed < 9400; ++seed) {
    std::optional<Sample> sample = random_sample(seed);
    if (!sample) continue;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << sample->world->far);
    std::mt19937 random(seed);
    const Gateway gateway(*sample->world, sample->owner, sample->node);
    const std::uint32_t room = sample->world->far.c.params.topk;
    for (std::uint32_t i = 0; i < sample->count(); ++i) {
      const std::uint32_t changes = between(random, 0, 3);
      for (std::uint32_t j = 0; j < changes; ++j) {
        const auto last = static_cast<std::uint32_t>(sample->stride() - 1);
        sample->at(i)[between(random, 0, last)] = static_cast<std::byte>(random());
      }
      Unaligned body(random, sample->at(i), sample->stride());
      Guarded sums(room * gateway.stride(), 0);
      if (sum_rows_for(gateway.args, body.data(), 0, 1, sums.as<std::byte>(), room).fault) ++refused;
      sums.expect_intact("sums");
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 100u);
}

// A batch with one bad record: the tokens before it are done, nothing behind.
TEST(FarSums, EveryRecordMustBeTheNextOne) {
  std::uint32_t samples = 0;
  for (std::uint32_t seed = 9000; seed < 9150; ++seed) {
    std::optional<Sample> sample = random_sample(seed);
    if (!sample) continue;
    ++samples;
    const World& world = *sample->world;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << world.far);
    std::mt19937 random(seed);
    const std::vector<Sums> sums = sums_for(random, world, sample->owner);
    const Sums& of_node = sums[sample->node];
    const std::uint32_t hidden = world.far.c.params.hidden;
    const std::size_t before = std::size_t{hidden} * 2 +
                               (world.options.return_weights ? world.far.c.params.topk * sizeof(float) : 0);
    const std::size_t stride = world.far.shape().sum_stride(world.options.return_weights);
    std::uint32_t batch = between(random, 0, static_cast<std::uint32_t>(of_node.batches.size()) - 1);
    while (of_node.batches[batch].num_records == 0) --batch;
    const std::uint32_t record = between(random, 0, of_node.batches[batch].num_records - 1);
    auto* const place = const_cast<std::byte*>(of_node.batches[batch].records) + record * stride + before;
    const auto good = host::read_far<abi::FarSum>(place);
    for (const bool token : {true, false}) {
      abi::FarSum bad = good;
      (token ? bad.token : bad.domain) += seed % 2 == 0 ? 1 : 0xffffffff;
      std::memcpy(place, &bad, sizeof(bad));
      Owner owner(world, sample->owner);
      std::vector<FarStream> streams(sums.size());
      for (std::size_t n = 0; n < sums.size(); ++n) streams[n].batches = sums[n].batches;
      const std::uint32_t tokens = owner.input.num_tokens;
      const FarMerged merged = merge_sums(owner.args, streams, 0, tokens);
      EXPECT_EQ(merged.fault.field, token ? FarField::kToken : FarField::kDomain);
      EXPECT_EQ(merged.fault.record, record);
      EXPECT_EQ(merged.fault.value, token ? bad.token : bad.domain);
      EXPECT_EQ(merged.node, sample->node);
      EXPECT_EQ(merged.batch, batch);
      EXPECT_EQ(merged.tokens, good.token);
      const std::size_t row = std::size_t{hidden} * 2;
      EXPECT_TRUE(owner.out.is_poison(merged.tokens * row, tokens * row));
      owner.out.expect_intact("out");
      owner.out_weights.expect_intact("out_weights");
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 20u);
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, FarCombine, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
