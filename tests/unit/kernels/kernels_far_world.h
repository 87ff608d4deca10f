// Combine of a group on several nodes: what gateways and owners have, for the tests of asks and sums.
#pragma once

#include "kernels_answers.h"
#include "kernels_far_cases.h"

namespace epd::kernels::testing_cases {

// A combine of a group on several nodes.
struct World {
  FarCase far;
  reference::CombineOptions options;
  std::vector<reference::CombineInput> answers;

  World(FarCase group, std::uint32_t seed, const reference::CombineOptions& asked)
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

// A gateway that serves the asks of one owner.
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
    args.return_weights = world.options.return_weights != abi::kReturnNone;
    args.sum_weights = world.options.return_weights == abi::kReturnSum;
  }
  std::size_t stride() const { return args.shape.sum_stride(args.return_weights); }

  SourcePlaces places;
  std::vector<CombineSource> sources;
  std::vector<std::uint8_t> whole;
  FarSumArgs args;
};

// The asks for tokens of `owner` that go to `node`.
std::vector<std::byte> asks_of(const World& world, std::uint32_t owner, std::uint32_t node,
                               std::span<const std::uint32_t> tokens, int poison = 0);

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

// Those of all nodes, in batches and at places as chance wants them.
std::vector<Sums> sums_for(std::mt19937& random, const World& world, std::uint32_t owner);

// The inputs of an owner's merge, and its outputs.
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
    args.crc = far.crc;
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
    near.sum_weights = world.options.return_weights == abi::kReturnSum;
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

  void expect(const reference::RankCombined& expected) {
    expect_bits("out", out.as<std::uint16_t>(), expected.out);
    expect_bits("out_weights", out_weights.as<float>(), expected.out_weights);
    out.expect_intact("out");
    out_weights.expect_intact("out_weights");
  }

  const FarCase& far;
  const reference::RankInput& input;
  std::vector<std::uint32_t> nodes;
  std::vector<std::uint8_t> whole;
  std::vector<CombineSource> sources;
  Guarded out, out_weights;
  FarMergeArgs args;
};

}  // namespace epd::kernels::testing_cases
