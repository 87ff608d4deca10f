// What the members of groups may hold: bytes for routings, and mappings of the engines.
#include "arena_store.h"

#include "proto/route_memory.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
    return store.acquire({group, 0}, uid, uid == kUser ? quotas : UserQuotas(), host, {shape, {}, nullptr});
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
  limits.mappings = {100, 72};  // 28 for ranks, 14 of a user: with the boards, four on the same engine
  ArenaStore store(limits, closer_, descriptors_);
  const DeviceName first{abi::DeviceKind::kHost, 0};
  const DeviceName second{abi::DeviceKind::kHost, 1};
  const WantedMemory wanted{shape_of(16), {}, nullptr};
  for (std::uint32_t rank = 0; rank < 4; ++rank)
    ASSERT_TRUE(store.acquire({1, rank}, kUser, {}, first, wanted).ok()) << rank;
  expect_says(store.acquire({1, 4}, kUser, {}, first, wanted),
              {"engine of host:0 has 12", "of user 1001", "need 3 more", "allowed: 14", "vm.max_map_count",
               "is 100", "72"});
  EXPECT_TRUE(store.acquire({1, 4}, kUser, {}, second, wanted).ok()) << "2 more on host:0; all 5 on host:1";
  expect_says(store.acquire({1, 5}, kUser, {}, second, wanted), {"engine of host:0 has 14", "allowed: 14"});
  EXPECT_TRUE(store.acquire({2, 0}, 7, {}, first, wanted).ok()) << "another user";
}

TEST(MappingCount, MappingsAreGivenBackWithTheRank) {
  MappingCount count;
  count.set_limit({1000, 0});
  const DeviceName first{abi::DeviceKind::kHost, 0};
  const DeviceName second{abi::DeviceKind::kHost, 1};
  ASSERT_TRUE(count.add({1, 0}, kUser, first, 3).ok());
  ASSERT_TRUE(count.add({1, 1}, kUser, second, 0).ok());
  ASSERT_TRUE(count.add({1, 2}, kUser, second, 0).ok());
  EXPECT_EQ(count.of_engine(first), 5u + 2 + 2 + 1);
  EXPECT_EQ(count.of_engine(second), 5u + 2 + 2 + 2);
  count.remove({1, 1});
  EXPECT_EQ(count.of_engine(first), 5u + 2 + 1);
  EXPECT_EQ(count.of_engine(second), 5u + 2 + 1);
  count.remove({1, 2});
  EXPECT_EQ(count.of_engine(second), 0u) << "it has forgotten the group";
  count.remove({1, 0});
  EXPECT_EQ(count.of_engine(first), 0u);
}

}  // namespace
}  // namespace epd::supervisor
