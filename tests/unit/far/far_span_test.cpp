// Which rank is on which node: the same tables on every node, whatever the nodes are called.
#include "far/flow.h"
#include "far/seal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace epd::far {
namespace {

using Ranks = std::vector<std::uint32_t>;

Ranks list(std::span<const std::uint32_t> ranks) {
  return {ranks.begin(), ranks.end()};
}

TEST(FarSpan, EqualNodesHaveRankToRankGateways) {
  const Ranks nodes{0, 0, 1, 1};
  const Span a({nodes, {}, 0, 2});
  EXPECT_EQ(list(a.near_ranks()), (Ranks{0, 1}));
  EXPECT_EQ(list(a.far_nodes()), Ranks{1});
  EXPECT_EQ(a.gateway(0, 1), 2u);
  EXPECT_EQ(a.gateway(1, 1), 3u);
  EXPECT_EQ(a.served_by(0), Ranks{2});
  EXPECT_TRUE(a.is_whole(0) && a.is_whole(1));
}

TEST(FarSpan, UnequalNodesSpreadTheirRanksOverTheGateways) {
  const Ranks nodes{5, 5, 5, 9};
  const Span three({nodes, {}, 5, 2});
  const Span one({nodes, {}, 9, 2});
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(three.gateway(rank, 9), 3u);
  EXPECT_EQ(one.gateway(3, 5), 0u);
  EXPECT_EQ(one.served_by(3), (Ranks{0, 1, 2}));
  EXPECT_EQ(three.served_by(0), Ranks{3});
  EXPECT_TRUE(three.served_by(1).empty());
  EXPECT_TRUE(three.is_whole(0));
  EXPECT_FALSE(three.is_whole(1)) << "ranks 2 and 3 are on two nodes";
}

TEST(FarSpan, MaskedRanksAreNobodysGatewaysAndBreakNoDomain) {
  const Ranks nodes{0, 0, 1, 1};
  const std::vector<std::uint8_t> masked{0, 0, 1, 0};
  const Span a({nodes, masked, 0, 3});
  EXPECT_EQ(a.gateway(0, 1), 3u);
  EXPECT_EQ(a.gateway(1, 1), 3u);
  EXPECT_TRUE(a.is_whole(0)) << "the rank that would split it is masked";
  const std::vector<std::uint8_t> all{0, 0, 1, 1};
  EXPECT_TRUE(Span({nodes, all, 0, 0}).far_nodes().empty());
}

TEST(FarSpan, NodesBeginWithTheOneBehindThem) {
  const Ranks nodes{7, 3, 11, 5};
  EXPECT_EQ(list(Span({nodes, {}, 5, 0}).far_nodes()), (Ranks{7, 11, 3}));
  EXPECT_EQ(list(Span({nodes, {}, 11, 0}).far_nodes()), (Ranks{3, 5, 7}));
}

// In any view all nodes agree, a gateway is an active rank of its node, and all ranks are served once.
TEST(FarSpan, AllNodesHaveTheSameTables) {
  std::mt19937 random(20261123);
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t ranks = 1 + random() % 40;
    const std::uint32_t num_nodes = 1 + random() % 6;
    const std::uint32_t sum_ranks = random() % (ranks + 1);
    Ranks nodes(ranks);
    std::vector<std::uint8_t> masked(ranks);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      nodes[rank] = 3 * (random() % num_nodes);
      masked[rank] = random() % 5 == 0 ? 1 : 0;
    }
    std::vector<std::vector<int>> served(ranks, std::vector<int>(3 * num_nodes));
    for (std::uint32_t node = 0; node < 3 * num_nodes; node += 3) {
      const Span span({nodes, masked, node, sum_ranks});
      for (const std::uint32_t gateway : span.near_ranks()) {
        for (const std::uint32_t rank : span.served_by(gateway)) {
          EXPECT_EQ(Span({nodes, masked, nodes[rank], sum_ranks}).gateway(rank, node), gateway);
          ++served[rank][node];
        }
      }
      for (std::uint32_t domain = 0; domain < span.num_domains(); ++domain) {
        std::vector<std::uint32_t> at;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          if (masked[rank] == 0 && span.domain_of(rank) == domain) at.push_back(nodes[rank]);
        }
        std::sort(at.begin(), at.end());
        EXPECT_EQ(span.is_whole(domain), at.empty() || at.front() == at.back());
      }
    }
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      for (std::uint32_t node = 0; node < 3 * num_nodes; node += 3) {
        const bool active_there = !Span({nodes, masked, node, sum_ranks}).near_ranks().empty();
        EXPECT_EQ(served[rank][node], masked[rank] == 0 && nodes[rank] != node && active_there ? 1 : 0);
      }
    }
  }
}

// The paper's vectors: key 00 01 .. 0f, of the bytes 00 01 .. n-1.
TEST(FarToken, IsSipHash24) {
  const EpochKey key{0x0706050403020100ull, 0x0f0e0d0c0b0a0908ull};
  std::vector<std::byte> bytes;
  const auto hash = [&] { return sip_hash(key, bytes); };
  EXPECT_EQ(hash(), 0x726fdb47dd0e0e31ull);
  for (int i = 0; i < 15; ++i) bytes.push_back(static_cast<std::byte>(i));
  EXPECT_EQ(hash(), 0xa129ca6149be45e5ull);
  EXPECT_NE(message_token(key, 1, 2), message_token(key, 2, 1));
}

}  // namespace
}  // namespace epd::far
