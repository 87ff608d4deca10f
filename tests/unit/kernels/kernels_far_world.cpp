#include "kernels_far_world.h"

#include <cstring>

namespace epd::kernels::testing_cases {

std::vector<std::byte> asks_of(const World& world, std::uint32_t owner, std::uint32_t node,
                               std::span<const std::uint32_t> tokens, int poison) {
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

namespace {

// Serves all asks, in batches of sums with space for so many records or more.
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

}  // namespace

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

}  // namespace epd::kernels::testing_cases
