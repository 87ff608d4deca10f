// Regions bound to memory of the caller's own, as libepd sees them: arguments, what goes to the daemon, where
// the regions are. What the memory must be is the daemon's to say.
#include "client_fixture.h"
#include "epd/epd.hpp"
#include "proto/binding_rules.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <functional>
#include <vector>

namespace epd::testing {
namespace {

UniqueFd make_memory() {
  return UniqueFd(::memfd_create("binding", MFD_CLOEXEC));
}

class ClientBinding : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error(); }
  void TearDown() override { epd_session_detach(session_); }

  epd_binding_t binding(epd_region_t region) {
    epd_binding_t made;
    epd_binding_init(&made);
    made.region = region;
    made.fd = memory_.get();
    made.address = place_;
    return made;
  }
  epd_status_t join(const std::vector<epd_binding_t>& bindings) {
    epd_group_config_t config = small_config();
    config.bindings = bindings.data();
    config.num_bindings = static_cast<std::uint32_t>(bindings.size());
    return epd_group_join(session_, &config, &group_);
  }
  void expect_refused(const std::function<void(epd_binding_t&)>& change, const std::string& said) {
    epd_binding_t bad = binding(EPD_REGION_X);
    change(bad);
    EXPECT_EQ(join({bad}), EPD_INVALID_ARGUMENT) << said;
    EXPECT_ERROR_HAS(said);
  }

  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
  UniqueFd memory_ = make_memory();
  char place_[16] = {};  // nothing in the library looks at what is there
};

TEST_F(ClientBinding, GoesToTheDaemonAndBack) {
  const UniqueFd other = make_memory();
  std::vector<epd_binding_t> bindings = {binding(EPD_REGION_Y), binding(EPD_REGION_RECV_X),
                                         binding(EPD_REGION_OUT)};
  bindings[0].offset = 4096;
  bindings[0].stride = 65536;
  bindings[1].fd = other.get();
  bindings[1].address = place_ + 8;
  bindings[2].offset = 128;
  ASSERT_EQ(join(bindings), EPD_OK) << epd_last_error();
  const FakeMember& member = daemon_.member();
  ASSERT_EQ(member.memory.size(), 2u) << "each descriptor goes once";
  const auto& y = member.bindings[EPD_REGION_Y];
  const auto& recv_x = member.bindings[EPD_REGION_RECV_X];
  const auto& out = member.bindings[EPD_REGION_OUT];
  EXPECT_EQ(y.memory, 1u);
  EXPECT_EQ(y.offset, 4096u);
  EXPECT_EQ(y.stride, 65536u);
  EXPECT_EQ(recv_x.memory, 2u);
  EXPECT_EQ(recv_x.stride, 2u * 8 * 256) << "close together, unless asked otherwise";
  EXPECT_EQ(out.memory, 1u);
  EXPECT_EQ(out.offset, 128u);
  EXPECT_EQ(member.bindings[EPD_REGION_X].memory, 0u);

  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 3, &buffers), EPD_OK);
  EXPECT_EQ(buffers.y, place_ + std::size_t{3} * 65536);
  EXPECT_EQ(buffers.recv_x, place_ + 8 + std::size_t{3} * 4096);
  const abi::UserArenaLayout arena(member.shape, abi::bound_regions(member.bindings));
  EXPECT_LT(arena.total_bytes, abi::UserArenaLayout(member.shape).total_bytes) << "no room for what is bound";
  *static_cast<char*>(buffers.x) = 'x';
  EXPECT_EQ(*member.user.as<char>(arena.at(3, abi::Region::kX)), 'x');
}

TEST_F(ClientBinding, ArgumentsAreCheckedByName) {
  expect_refused([](auto& b) { b.region = static_cast<epd_region_t>(19); },
                 "bindings[0].region is 19; allowed: 0 .. 18");
  expect_refused([](auto& b) { b.region = EPD_REGION_X_SCALES; },
                 "binding of x_scales: this group has no such region");
  expect_refused([](auto& b) { b.fd = -2; }, "bindings[0].fd is -2; allowed: an open descriptor, or");
  expect_refused([](auto& b) { b.fd = EPD_FD_OF_ADDRESS; },
                 "bindings[0]: fd is EPD_FD_OF_ADDRESS (-1); allowed on a host device: the descriptor");
  expect_refused([](auto& b) { b.fd = EPD_FD_OF_ADDRESS, b.offset = 128; },
                 "bindings[0].offset is 128; allowed: 0 with EPD_FD_OF_ADDRESS");
  expect_refused([](auto& b) { b.fd = 987654; }, "bindings[0].fd is 987654");
  expect_refused([](auto& b) { b.address = nullptr; }, "bindings[0].address is NULL");
  expect_refused([](auto& b) { b.offset = 64; }, "binding of x: offset is 64; allowed: multiples of 128");
  expect_refused([](auto& b) { b.offset = ~std::uint64_t{0} / 128 * 128; }, "2^50");
  expect_refused([](auto& b) { b.stride = 8 * 256 - 128; },
                 "stride is 1920; allowed: multiples of 128, 2048 ..");
  expect_refused([](auto& b) { b.stride = 8 * 256 + 1; }, "stride is 2049");
  expect_refused([](auto& b) { b.size = 3; }, "bindings[0].size is 3");
  EXPECT_EQ(join({binding(EPD_REGION_X), binding(EPD_REGION_X)}), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("bindings[1]: x is bound twice");
  EXPECT_EQ(join(std::vector<epd_binding_t>(20, binding(EPD_REGION_X))), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_bindings is 20; allowed: 0 .. 19");
  epd_group_config_t config = small_config();
  config.num_bindings = 1;
  EXPECT_EQ(epd_group_join(session_, &config, &group_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("bindings is NULL");
}

// A caller that was built with a longer epd_binding_t steps by its own size.
TEST_F(ClientBinding, LongerStructsOfANewerCaller) {
  struct Newer {
    epd_binding_t known{};
    std::uint64_t unknown = 0;
  };
  std::vector<Newer> newer(2);
  newer[0].known = binding(EPD_REGION_X);
  newer[1].known = binding(EPD_REGION_OUT);
  for (Newer& each : newer) each.known.size = sizeof(Newer);
  epd_group_config_t config = small_config();
  config.bindings = &newer[0].known;
  config.num_bindings = 2;
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.member().bindings[EPD_REGION_OUT].memory, 1u);
  newer[1].unknown = 1;
  config.name = "h";
  EXPECT_EQ(epd_group_join(session_, &config, &group_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("bindings[1] has a field");
}

TEST_F(ClientBinding, RegionBytes) {
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

TEST_F(ClientBinding, WrapperPassesThemOn) {
  epd::AttachOptions options;
  FakeDaemon own;
  options.socket_path = own.socket_path();
  epd::Session session(options);
  epd::Config config;
  config.name = "w";
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  config.bindings = {binding(EPD_REGION_X)};
  const epd::Group group = session.join(config);
  EXPECT_EQ(static_cast<void*>(group.buffers(0).x.data()), static_cast<void*>(place_));
  EXPECT_EQ(own.member().bindings[EPD_REGION_X].memory, 1u);
}

}  // namespace
}  // namespace epd::testing
