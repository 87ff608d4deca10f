// The memory of a group, as libepd tells it before the group is joined.
#include "client_fixture.h"
#include "epd/epd.hpp"
#include "proto/arena.h"
#include "proto/results.h"
#include "proto/route_memory.h"
#include "proto/session.h"
#include "proto/waits.h"

#include <cstring>
#include <functional>

namespace epd::testing {
namespace {

abi::GroupShape shape_of(const epd_group_config_t& c) {
  abi::GroupShape shape{};
  shape.num_ranks = c.num_ranks;
  shape.num_experts = c.num_experts;
  shape.max_tokens = c.max_tokens;
  shape.hidden = c.hidden;
  shape.topk = c.topk;
  shape.depth = c.depth != 0 ? c.depth : 4;
  shape.layout = static_cast<abi::Layout>(c.layout);
  shape.num_handles = c.num_handles;
  return shape;
}

epd_group_bytes_t bytes_of(const epd_group_config_t& config, epd_device_kind_t kind) {
  epd_group_bytes_t bytes;
  epd_group_bytes_init(&bytes);
  EXPECT_EQ(epd_group_bytes(&config, kind, &bytes), EPD_OK) << epd_last_error();
  return bytes;
}

TEST(ClientBytes, AreThoseOfTheLayouts) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT}) {
    for (const std::uint32_t handles : {0u, 5u}) {
      epd_group_config_t config = small_config();
      config.layout = layout;
      config.num_handles = handles;
      config.name = nullptr;  // not looked at
      config.rank = 77;
      const abi::GroupShape shape = shape_of(config);
      const abi::ExchangeArenaLayout exchange(shape);
      for (const epd_device_kind_t kind : {EPD_DEVICE_KIND_HOST, EPD_DEVICE_KIND_CUDA}) {
        const epd_group_bytes_t bytes = bytes_of(config, kind);
        EXPECT_EQ(bytes.user_arena, abi::UserArenaLayout(shape).total_bytes);
        EXPECT_EQ(bytes.exchange_arena, exchange.total_bytes);
        EXPECT_EQ(bytes.routing_records, exchange.inboxes - exchange.routing);
        EXPECT_EQ(bytes.inboxes, exchange.generation - exchange.inboxes);
        EXPECT_EQ(bytes.inboxes != 0, layout != EPD_LAYOUT_COMPACT);
        EXPECT_EQ(bytes.board, abi::WaitsLayout(shape).total_bytes);
        EXPECT_EQ(bytes.results, abi::ResultsLayout(shape).total_bytes);
        EXPECT_EQ(bytes.rank, bytes.user_arena + bytes.exchange_arena + bytes.board + bytes.results);
        EXPECT_EQ(bytes.group, 2 * bytes.rank);
        EXPECT_EQ(bytes.arena_quota, bytes.rank);
        EXPECT_EQ(bytes.routing_quota, kind == EPD_DEVICE_KIND_HOST ? abi::routing_bytes(shape) : 0);
      }
    }
  }
}

TEST(ClientBytes, BoundRegionsHaveNoRoom) {
  epd_binding_t bindings[2];
  for (epd_binding_t& binding : bindings) epd_binding_init(&binding);  // no memory yet
  bindings[0].region = EPD_REGION_RECV_X;
  bindings[1].region = EPD_REGION_Y;
  epd_group_config_t config = small_config();
  const epd_group_bytes_t whole = bytes_of(config, EPD_DEVICE_KIND_HOST);
  std::uint64_t one = 0;
  std::uint64_t other = 0;
  ASSERT_EQ(epd_region_bytes(&config, EPD_REGION_RECV_X, &one), EPD_OK);
  ASSERT_EQ(epd_region_bytes(&config, EPD_REGION_Y, &other), EPD_OK);
  config.bindings = bindings;
  config.num_bindings = 2;
  const std::uint64_t elsewhere = 4 * (abi::align_up(one, 4096) + abi::align_up(other, 4096));
  const epd_group_bytes_t host = bytes_of(config, EPD_DEVICE_KIND_HOST);
  EXPECT_EQ(host.rank, whole.rank - elsewhere);
  EXPECT_EQ(host.arena_quota, whole.rank) << "bound memory of the host counts";
  const epd_group_bytes_t cuda = bytes_of(config, EPD_DEVICE_KIND_CUDA);
  EXPECT_EQ(cuda.user_arena, whole.user_arena - elsewhere);
  EXPECT_EQ(cuda.arena_quota, whole.rank - elsewhere);
}

TEST(ClientBytes, RefusesWhatAJoinRefuses) {
  epd_group_bytes_t bytes;
  epd_group_bytes_init(&bytes);
  const auto expect = [&bytes](const char* text, const std::function<void(epd_group_config_t&)>& change) {
    epd_group_config_t config = small_config();
    change(config);
    EXPECT_EQ(epd_group_bytes(&config, EPD_DEVICE_KIND_HOST, &bytes), EPD_INVALID_ARGUMENT) << text;
    EXPECT_STREQ(epd_last_error(), text);
  };
  expect("num_experts is 5; allowed: multiples of num_ranks, which is 2", [](auto& c) { c.num_experts = 5; });
  epd_binding_t bindings[2];
  for (epd_binding_t& binding : bindings) epd_binding_init(&binding);
  const auto bind = [&bindings](auto& c) {
    c.bindings = bindings;
    c.num_bindings = 2;
  };
  expect("bindings[1]: x is bound twice; allowed: once", bind);
  bindings[1].region = EPD_REGION_BIAS_1;
  expect("binding of bias[1]: this group has no such region", bind);
  const epd_group_config_t good = small_config();
  epd_device_kind_t kind;
  const std::uint32_t two = 2;
  std::memcpy(&kind, &two, sizeof(two));
  EXPECT_EQ(epd_group_bytes(&good, kind, &bytes), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(), "kind is 2; allowed: 0 (EPD_DEVICE_KIND_HOST) or 1 (EPD_DEVICE_KIND_CUDA)");
  EXPECT_EQ(epd_group_bytes(nullptr, EPD_DEVICE_KIND_HOST, &bytes), EPD_INVALID_ARGUMENT);
  EXPECT_EQ(epd_group_bytes(&good, EPD_DEVICE_KIND_HOST, nullptr), EPD_INVALID_ARGUMENT);
  bytes.size = 0;
  EXPECT_EQ(epd_group_bytes(&good, EPD_DEVICE_KIND_HOST, &bytes), EPD_INVALID_ARGUMENT);
  bytes.size = offsetof(epd_group_bytes_t, exchange_arena);
  bytes.exchange_arena = 4711;
  EXPECT_EQ(epd_group_bytes(&good, EPD_DEVICE_KIND_HOST, &bytes), EPD_OK) << epd_last_error();
  EXPECT_EQ(bytes.exchange_arena, 4711u) << "written behind the caller's struct";
}

TEST(ClientBytes, TheWrapperTellsThemToo) {
  epd::Config config;
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  const epd_group_bytes_t same = bytes_of(small_config(), EPD_DEVICE_KIND_CUDA);
  EXPECT_EQ(epd::group_bytes(config, EPD_DEVICE_KIND_CUDA).group, same.group);
  config.topk = 33;
  EXPECT_THROW(epd::group_bytes(config, EPD_DEVICE_KIND_CUDA), epd::Error);
}

}  // namespace
}  // namespace epd::testing
