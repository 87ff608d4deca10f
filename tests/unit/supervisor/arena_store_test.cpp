// The limits of groups' members: bytes for routings, and mappings of the engines.
#include "arena_store.h"

#include "proto/route_memory.h"
#include "proto/waits.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd::supervisor {
namespace {

using device::DeviceName;

constexpr std::uint32_t kUser = 1001;

abi::GroupShape shape_of(std::uint32_t max_tokens) {
  return {
      1, 8, max_tokens, 128, 2, 2, abi::Payload::kBf16, abi::IndexType::kInt32, abi::LossPolicy::kFailFast};
}

ArenaStore::Limits plenty() {
  return {std::uint64_t{1} << 40, std::uint64_t{1} << 40, {65530, 8192}};
}

class ArenaStoreTest : public testing::Test {
 protected:
  Closer closer_;
  DescriptorBudget descriptors_{4096};
};

void expect_says(const Status& status, const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  for (const std::string& word : words)
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " in " << status.message();
}

TEST_F(ArenaStoreTest, RoutingsAreCountedOverAllAndForEachUser) {
  const abi::GroupShape shape = shape_of(4096);
  const std::uint64_t each = abi::routing_bytes(shape);
  ArenaStore::Limits limits = plenty();
  limits.max_routing_bytes = 3 * each;
  ArenaStore store(limits, closer_, descriptors_);
  UserQuotas quotas;
  quotas.routing_bytes = {2 * each, "limits.max_routing_bytes_per_user"};
  const DeviceName host{abi::DeviceKind::kHost, 0};
  const auto join = [&](std::uint64_t group, std::uint32_t uid) {
    return store.acquire({group, 0}, uid, uid == kUser ? quotas : UserQuotas(), host, {shape});
  };
  EXPECT_TRUE(join(1, kUser).ok());
  EXPECT_TRUE(join(2, kUser).ok());
  expect_says(join(3, kUser), {"user 1001 has " + std::to_string(2 * each), "routings of this rank",
                               "allowed: " + std::to_string(2 * each), "limits.max_routing_bytes_per_user"});
  EXPECT_TRUE(join(4, 7).ok());
  expect_says(join(5, 7), {"all users have " + std::to_string(3 * each), "limits.max_routing_bytes)"});
  store.release(1, 0);
  EXPECT_TRUE(join(6, 7).ok()) << "given back";
}

// Each membership costs mappings on every engine of its group. Counted only by arenas and groups, a client
// could bring all engines to vm.max_map_count, where they ended, and so did their successors.
TEST_F(ArenaStoreTest, MappingsAreCountedForEachEngineThatMustMap) {
  ArenaStore::Limits limits = plenty();
  // 36 for ranks, 18 of a user: with boards and results, four on the same engine.
  limits.mappings = {100, 64};
  ArenaStore store(limits, closer_, descriptors_);
  const DeviceName first{abi::DeviceKind::kHost, 0};
  const DeviceName second{abi::DeviceKind::kHost, 1};
  const WantedMemory wanted{shape_of(16)};
  for (std::uint32_t rank = 0; rank < 4; ++rank)
    ASSERT_TRUE(store.acquire({1, rank}, kUser, {}, first, wanted).ok()) << rank;
  expect_says(store.acquire({1, 4}, kUser, {}, first, wanted),
              {"engine of host:0 has 16", "of user 1001", "need 4 more", "allowed: 18", "vm.max_map_count",
               "is 100", "64"});
  EXPECT_TRUE(store.acquire({1, 4}, kUser, {}, second, wanted).ok()) << "2 more on host:0; all 5 on host:1";
  expect_says(store.acquire({1, 5}, kUser, {}, second, wanted), {"engine of host:0 has 18", "allowed: 18"});
  EXPECT_TRUE(store.acquire({2, 0}, 7, {}, first, wanted).ok()) << "another user";
}

// The waits of the ranks that stay must not fall when another leaves.
TEST_F(ArenaStoreTest, WaitsOfRanksThatHaveGoneAreKeptWhileTheGroupLives) {
  abi::GroupShape shape = shape_of(16);
  shape.num_ranks = 3;
  shape.num_experts = 9;
  ArenaStore store(plenty(), closer_, descriptors_);
  const DeviceName host{abi::DeviceKind::kHost, 0};
  for (std::uint32_t rank = 0; rank < 3; ++rank)
    ASSERT_TRUE(store.acquire({7, rank}, kUser, {}, host, {shape}).ok());
  ASSERT_TRUE(store.acquire({8, 0}, kUser, {}, host, {shape}).ok());
  EXPECT_TRUE(store.gone_waits(7).empty());
  const std::shared_ptr<const Mapping> board = store.find(7, 1)->board_map;
  abi::RankWaits::in(board->bytes(), shape).peers[2].ready_ns = 70;
  abi::RankWaits::in(store.find(7, 2)->board_map->bytes(), shape).peers[2].arrived_ns = 5;
  store.release(7, 1);
  store.release(7, 2);
  const std::vector<WaitSum> gone = store.gone_waits(7);
  ASSERT_EQ(gone.size(), 3u);
  EXPECT_EQ(gone[2].ready_ns, 70u);
  EXPECT_EQ(gone[2].arrived_ns, 5u);
  EXPECT_EQ(gone[0].ready_ns, 0u);
  EXPECT_TRUE(store.gone_waits(8).empty());

  WaitingGroup group{7, "g", shape, {{0, "host:0", store.find(7, 0)->board_map}}, gone};
  abi::RankWaits::in(group.ranks[0].board->bytes(), shape).peers[2].ready_ns = 1'930;
  abi::RankWaits::in(group.ranks[0].board->bytes(), shape).peers[1].ready_ns = 9'000;
  abi::RankWaits::in(group.ranks[0].board->bytes(), shape).counts->rows = 12;
  const v1::GetWaitsResponse told = message_of({group}, {"", 3, 1});
  ASSERT_EQ(told.groups_size(), 1);
  ASSERT_EQ(told.groups(0).ranks_size(), 3);
  EXPECT_EQ(told.groups(0).ranks(2).waited_for_ready_us(), 2u)
      << "70 ns of the one that has gone, and 1.93 us";
  EXPECT_EQ(told.groups(0).ranks(2).device(), "");
  EXPECT_EQ(told.groups(0).ranks(0).waited_us(), 10u);
  EXPECT_EQ(told.groups(0).ranks(0).rows(), 12u);
  ASSERT_EQ(told.groups(0).pairs_size(), 1) << "the longest one";
  EXPECT_EQ(told.groups(0).pairs(0).peer(), 1u);
  EXPECT_EQ(told.groups(0).pairs_left_out(), 1u);
  EXPECT_EQ(message_of({group}, {"", 2, 9}).groups(0).pairs_size(), 0) << "it has more ranks than that";

  store.release(7, 0);
  EXPECT_TRUE(store.gone_waits(7).empty()) << "with its last rank the group is forgotten";
}

// One user's pages ended engine after engine, and nobody ended his session.
TEST_F(ArenaStoreTest, SessionsOfTheUserWithMostPagesTheLargestFirst) {
  ArenaStore store(plenty(), closer_, descriptors_);
  const DeviceName host{abi::DeviceKind::kHost, 0};
  const auto join = [&](std::uint64_t session, std::uint32_t uid, std::size_t touched) {
    ASSERT_TRUE(store.acquire({session, 0}, uid, {}, host, {shape_of(4096), session}).ok());
    const std::string bytes(touched, 'x');
    ASSERT_EQ(::pwrite(store.find(session, 0)->user.get(), bytes.data(), touched, 0),
              static_cast<ssize_t>(touched));
  };
  EXPECT_FALSE(store.fullest());
  join(1, 7, 50 << 12);
  join(2, kUser, 20 << 12);
  join(3, kUser, 40 << 12);
  const auto fullest = store.fullest();
  ASSERT_TRUE(fullest);
  EXPECT_EQ(fullest->uid, kUser);
  EXPECT_EQ(fullest->bytes, 60u << 12);
  EXPECT_EQ(fullest->sessions,
            (std::vector<std::pair<std::uint64_t, std::uint64_t>>{{40 << 12, 3}, {20 << 12, 2}}));
}

// A client that keeps its mapping would keep pages that no limit counts.
TEST_F(ArenaStoreTest, AnArenaThatIsGivenUpIsEmptyAndOthersKeepTheirContents) {
  ArenaStore store(plenty(), closer_, descriptors_);
  const DeviceName host{abi::DeviceKind::kHost, 0};
  const std::size_t size = 4096;
  for (std::uint64_t session = 1; session <= 3; ++session) {
    ASSERT_TRUE(store.acquire({session, 0}, kUser, {}, host, {shape_of(16), session}).ok());
    Result<Mapping> map = Mapping::map(store.find(session, 0)->user.get(), size, Access::kReadWrite);
    ASSERT_TRUE(map.ok());
    *map->as<std::uint64_t>() = session;
    if (session == 1) store.give_up(session);
    if (session == 2) store.give_up(session, 0);
    store.release(session, 0);
    while (!closer_.idle()) ::usleep(1000);
    EXPECT_EQ(*map->as<std::uint64_t>(), session == 3 ? 3u : 0u);
  }
}

TEST_F(ArenaStoreTest, WhoHasFilledTheMemoryIsPromisedNoMoreThanThat) {
  ArenaStore::Limits limits = plenty();
  limits.max_bytes_of_filler = 1 << 20;
  ArenaStore store(limits, closer_, descriptors_);
  const DeviceName host{abi::DeviceKind::kHost, 0};
  const WantedMemory large{shape_of(4096)};
  const UserQuotas quotas{{std::uint64_t{1} << 40, "limits.max_arena_bytes_per_user"}, {}};
  store.hold_to_memory(kUser);
  expect_says(store.acquire({1, 0}, kUser, quotas, host, large),
              {"user 1001 has 0", "allowed: 1048576 (a quarter of the memory, which this user had filled)"});
  EXPECT_TRUE(store.acquire({2, 0}, 7, quotas, host, large).ok());
  store.set_limits(limits);
  EXPECT_TRUE(store.acquire({3, 0}, kUser, quotas, host, large).ok()) << "after a reload";
}

TEST(MappingCount, MappingsAreGivenBackWithTheRank) {
  MappingCount count;
  count.set_limit({1000, 0});
  const DeviceName first{abi::DeviceKind::kHost, 0};
  const DeviceName second{abi::DeviceKind::kHost, 1};
  ASSERT_TRUE(count.add({1, 0}, kUser, first).ok());
  ASSERT_TRUE(count.add({1, 1}, kUser, second).ok());
  ASSERT_TRUE(count.add({1, 2}, kUser, second).ok());
  EXPECT_EQ(count.of_engine(first), 2u + 2 + 2 + 2);
  EXPECT_EQ(count.of_engine(second), 2u + 2 + 2 + 4);
  count.remove({1, 1});
  EXPECT_EQ(count.of_engine(first), 2u + 2 + 2);
  EXPECT_EQ(count.of_engine(second), 2u + 2 + 2);
  count.remove({1, 2});
  EXPECT_EQ(count.of_engine(second), 0u) << "it has forgotten the group";
  count.remove({1, 0});
  EXPECT_EQ(count.of_engine(first), 0u);
}

}  // namespace
}  // namespace epd::supervisor
