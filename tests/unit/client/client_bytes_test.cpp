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
        EXPECT_EQ(bytes.routing_quota, kind == EPD_DEVICE_KIND_HOST ? abi::routing_bytes(shape) : 0);
      }
    }
  }
}

TEST(ClientBytes, OfRegions) {
  const epd_group_config_t config = small_config();
  std::uint64_t bytes = 1;
  ASSERT_EQ(epd_region_bytes(&config, EPD_REGION_X, &bytes), EPD_OK);
  EXPECT_EQ(bytes, 8u * 256);
  ASSERT_EQ(epd_region_bytes(&config, EPD_REGION_RECV_SCALES, &bytes), EPD_OK);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(epd_region_bytes(&config, static_cast<epd_region_t>(19), &bytes), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("region is 19; allowed: 0 .. 18");
  EXPECT_EQ(epd_region_bytes(&config, EPD_REGION_X, nullptr), EPD_INVALID_ARGUMENT);
  epd_group_config_t bad = config;
  bad.hidden = 100;
  EXPECT_EQ(epd_region_bytes(&bad, EPD_REGION_X, &bytes), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("hidden is 100");

  epd::Config same;
  same.num_ranks = config.num_ranks;
  same.num_experts = config.num_experts;
  same.max_tokens = config.max_tokens;
  same.hidden = config.hidden;
  same.topk = config.topk;
  EXPECT_EQ(epd::region_bytes(same, EPD_REGION_RECV_X), 2u * 8 * 256);
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
