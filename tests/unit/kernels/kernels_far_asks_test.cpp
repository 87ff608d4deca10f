// Asks and sums that are not as they must be: which field is bad is told, and nothing is stored outside.
#include "kernels_far_world.h"

#include <cstring>
#include <optional>

namespace epd::kernels {
namespace {

using namespace testing_cases;
using reference::CombineOptions;

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
std::optional<Sample> random_sample(std::uint32_t seed, bool crc = false) {
  FarCase far = random_far_case(seed, &host::best_row_kernels());
  far.crc = crc;
  Sample sample;
  const CombineOptions options{has_weights(far.c), seed % 2 == 0 ? abi::kReturnOwn : abi::kReturnNone};
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

TEST(FarAsks, NoFlippedBitPasses) {
  std::uint32_t samples = 0;
  for (std::uint32_t seed = 9000; seed < 9060; ++seed) {
    std::optional<Sample> sample = random_sample(seed, true);
    if (!sample) continue;
    ++samples;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << sample->world->far);
    const std::uint32_t bad = seed % sample->count();
    for (std::size_t byte = 0; byte < sample->stride(); ++byte) {
      std::byte* const place = sample->at(bad) + byte;
      change(*sample, place, *place ^ std::byte(1u << byte % 8), {FarField::kCrc, bad, 0, 0});
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 4u);
}

// An ask of random bytes stores nothing outside.
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

// This also holds for a range that has been judged: the CRCs are checked when it is merged.
TEST(FarSums, NoFlippedBitPasses) {
  std::uint32_t samples = 0;
  for (std::uint32_t seed = 9000; seed < 9100; ++seed) {
    std::optional<Sample> sample = random_sample(seed, true);
    if (!sample) continue;
    ++samples;
    const World& world = *sample->world;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << world.far);
    std::mt19937 random(seed);
    const std::vector<Sums> sums = sums_for(random, world, sample->owner);
    const FarBatch& batch = sums[sample->node].batches[0];
    const auto bytes = static_cast<std::uint32_t>(batch.num_records *
                                                  world.far.shape().sum_stride(world.options.return_weights));
    for (int i = 0; i < 20; ++i) {
      std::byte& spoiled = const_cast<std::byte*>(batch.records)[between(random, 0, bytes - 1)];
      const std::byte good = spoiled;
      spoiled ^= std::byte(1u << i % 8);
      Owner owner(world, sample->owner);
      std::vector<FarStream> streams(sums.size());
      for (std::size_t n = 0; n < sums.size(); ++n) streams[n].batches = sums[n].batches;
      std::vector<FarStream> judged = streams;
      const FarMerged bad = judge_sums(owner.args, judged, 0, owner.input.num_tokens);
      EXPECT_TRUE(bad.fault.field == FarField::kNone || bad.fault.field == FarField::kCrc);
      const FarMerged merged = merge_sums(owner.args, streams, 0, owner.input.num_tokens);
      EXPECT_EQ(merged.fault.field, FarField::kCrc);
      EXPECT_EQ(merged.node, sample->node);
      EXPECT_EQ(merged.batch, 0u);
      const std::size_t row = std::size_t{world.far.c.params.hidden} * 2;
      EXPECT_TRUE(owner.out.is_poison(merged.tokens * row, owner.input.num_tokens * row));
      spoiled = good;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(samples, 20u);
}

}  // namespace
}  // namespace epd::kernels
