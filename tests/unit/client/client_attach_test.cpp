// The client library's handshake and joins against a daemon that misbehaves in every way it can.
#include "client_fixture.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

namespace epd::testing {
namespace {

FakeSettings with(const std::function<void(FakeSettings&)>& change) {
  FakeSettings settings;
  change(settings);
  return settings;
}

// Attaches, and expects it to fail.
epd_status_t attach_status(const FakeSettings& settings, std::int32_t timeout_ms = 10'000) {
  const FakeDaemon daemon(settings);
  epd_session_t* session = nullptr;
  const epd_status_t status = attach_to(daemon, &session, timeout_ms);
  EXPECT_EQ(session, nullptr);
  epd_session_detach(session);
  return status;
}

TEST(ClientAttach, TellsWhereItIs) {
  const FakeDaemon daemon;
  epd_session_t* session = nullptr;
  ASSERT_EQ(attach_to(daemon, &session), EPD_OK) << epd_last_error();
  epd_session_info_t info;
  epd_session_info_init(&info);
  ASSERT_EQ(epd_session_info(session, &info), EPD_OK);
  EXPECT_EQ(info.session_id, 77u);
  EXPECT_STREQ(info.device, "host:3");
  EXPECT_STREQ(info.daemon, "fake 9.9.9");
  EXPECT_STREQ(info.boot_id, "ab000000000000000000000000000001");
  EXPECT_EQ(epd_session_check(session), EPD_OK);
  epd_session_detach(session);
}

TEST(ClientAttach, FindsTheSocketInTheEnvironment) {
  const FakeDaemon daemon;
  ASSERT_EQ(::setenv("EPD_SOCKET", daemon.socket_path().c_str(), 1), 0);
  epd_session_t* session = nullptr;
  EXPECT_EQ(epd_session_attach(nullptr, &session), EPD_OK) << epd_last_error();
  ::unsetenv("EPD_SOCKET");
  epd_session_detach(session);
}

// While a fleet is updated: a daemon of the version before, one that drains, or none, and the next one.
TEST(ClientAttach, TheNextDaemonTakesWhoTheFirstOneCannotServe) {
  const FakeDaemon other_layout(with([](FakeSettings& s) { s.layout_hash = 0x1234; }));
  const FakeDaemon drains(
      with([](FakeSettings& s) { s.refuse_hello = Status(StatusCode::kAborted, "drains"); }));
  const FakeDaemon refuses(
      with([](FakeSettings& s) { s.refuse_hello = Status(StatusCode::kResourceExhausted, "a quota"); }));
  const FakeDaemon serves;
  const std::string none = "/nonexistent/epd.sock";
  const auto attach = [](const std::string& paths) {
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = paths.c_str();
    epd_session_t* session = nullptr;
    const epd_status_t status = epd_session_attach(&options, &session);
    EXPECT_EQ(status == EPD_OK, session != nullptr);
    epd_session_detach(session);
    return status;
  };
  const std::string last = ":" + serves.socket_path();
  for (const std::string& first : {other_layout.socket_path(), drains.socket_path(), none})
    EXPECT_EQ(attach(first + last), EPD_OK) << first << ": " << epd_last_error();
  EXPECT_EQ(attach(none + ":" + other_layout.socket_path() + ":" + drains.socket_path() + last), EPD_OK);
  EXPECT_EQ(attach(refuses.socket_path() + last), EPD_RESOURCE_EXHAUSTED);
  EXPECT_EQ(attach(none + ":" + other_layout.socket_path() + ":" + none), EPD_VERSION_MISMATCH);
  EXPECT_ERROR_HAS("0x1234");
  EXPECT_ERROR_HAS(none);
  EXPECT_EQ(attach(none + ":"), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("socket path \"\" has 0 characters");
}

TEST(ClientAttach, AStoppedDaemonUsedUpTheTimeOfTheNextOnes) {
  const FakeDaemon stopped(with([](FakeSettings& s) { s.silent_hello = true; }));
  const FakeDaemon serves;
  const std::string none = ":/nonexistent/epd.sock";
  const std::string paths = stopped.socket_path() + none + none + none + ":" + serves.socket_path();
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = paths.c_str();
  options.timeout_ms = 1'500;
  epd_session_t* session = nullptr;
  EXPECT_EQ(epd_session_attach(&options, &session), EPD_OK) << epd_last_error();
  epd_session_detach(session);
}

TEST(ClientAttach, NobodyListens) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = "/nonexistent/epd.sock";
  epd_session_t* session = nullptr;
  EXPECT_EQ(epd_session_attach(&options, &session), EPD_DAEMON_LOST);
  EXPECT_ERROR_HAS("/nonexistent/epd.sock");
}

TEST(ClientAttach, RefusalsOfTheSocketSayWhatToDo) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const FakeDaemon daemon;
  const std::string folder = daemon.socket_path().substr(0, daemon.socket_path().rfind('/'));
  ASSERT_EQ(::chmod(folder.c_str(), 0755), 0);
  ASSERT_EQ(::chmod(daemon.socket_path().c_str(), 0660), 0);
  ASSERT_EQ(::chown(daemon.socket_path().c_str(), 0, 12345), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    epd_session_t* session = nullptr;
    const bool done =
        ::seteuid(4711) == 0 && attach_to(daemon, &session) == EPD_PERMISSION_DENIED &&
        std::string(epd_last_error()).find("allowed: to members of group 12345") != std::string::npos;
    if (!done) std::fprintf(stderr, "%s\n", epd_last_error());
    ::_exit(done ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ClientAttach, PathTooLongNamesItsLength) {
  const std::string path(200, 'x');
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = path.c_str();
  epd_session_t* session = nullptr;
  EXPECT_EQ(epd_session_attach(&options, &session), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("200");
  EXPECT_ERROR_HAS("107");
}

TEST(ClientAttach, RefusesBadOptions) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  epd_session_t* session = nullptr;
  options.timeout_ms = -7;
  EXPECT_EQ(epd_session_attach(&options, &session), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("timeout_ms is -7; allowed: 1 or more milliseconds, or 0 (5000)");
  options.timeout_ms = 0;
  options.device = "a device name that is longer than any device's";
  EXPECT_EQ(epd_session_attach(&options, &session), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("device");
  EXPECT_EQ(epd_session_attach(nullptr, nullptr), EPD_INVALID_ARGUMENT);
}

TEST(ClientAttach, VersionMismatchNamesBothVersions) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.version = 42; })), EPD_VERSION_MISMATCH);
  EXPECT_ERROR_HAS("42");
  EXPECT_ERROR_HAS("libepd " + std::string(epd_version()));
  EXPECT_ERROR_HAS("versions 3 .. 3");
  EXPECT_ERROR_HAS("fake 9.9.9");
}

TEST(ClientAttach, LayoutMismatchNamesBothLayouts) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.layout_hash = 0x1234; })), EPD_VERSION_MISMATCH);
  EXPECT_ERROR_HAS("0x1234");
}

TEST(ClientAttach, PassesRefusalsOn) {
  const Status refusal(StatusCode::kResourceExhausted, "this user has 8 sessions; allowed: 8");
  EXPECT_EQ(attach_status(with([&](FakeSettings& s) { s.refuse_hello = refusal; })), EPD_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(epd_last_error(), "this user has 8 sessions; allowed: 8");
}

TEST(ClientAttach, ARefusalIsNeverOk) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.refuse_hello = Status(StatusCode::kOk, "x"); })),
            EPD_INTERNAL);
}

TEST(ClientAttach, ADeviceOfAMachineWithoutADriver) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (driver != nullptr) {
    ::dlclose(driver);
    GTEST_SKIP() << "this machine has a driver";
  }
  EXPECT_EQ(attach_status(with([](auto& s) { s.device_kind = abi::DeviceKind::kCuda; })), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("libcuda.so.1");
}

TEST(ClientAttach, SilentDaemonMeetsTheDeadline) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.silent_hello = true; }), 50), EPD_DEADLINE_EXCEEDED);
}

TEST(ClientAttach, BrokenHandshakes) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.close_on_hello = true; })), EPD_DAEMON_LOST);
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.short_welcome = true; })), EPD_INTERNAL);
  EXPECT_ERROR_HAS("10 bytes");
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.wrong_nonce = true; })), EPD_INTERNAL);
  EXPECT_ERROR_HAS("nonce");
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.welcome_fds = 1; })), EPD_INTERNAL);
  EXPECT_ERROR_HAS("1 descriptors");
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.magic = false; })), EPD_INTERNAL);
}

TEST(ClientAttach, RefusesMemoryThatCouldShrink) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.sealed = false; })), EPD_INTERNAL);
  EXPECT_ERROR_HAS("not sealed");
}

TEST(ClientAttach, RefusesShortSegments) {
  EXPECT_EQ(attach_status(with([](FakeSettings& s) { s.segment_b_bytes = 100; })), EPD_INTERNAL);
  EXPECT_ERROR_HAS("100");
  EXPECT_ERROR_HAS(std::to_string(sizeof(abi::SegmentB)));
}

TEST(ClientAttach, OlderAndNewerStructs) {
  const FakeDaemon daemon;
  epd_session_t* session = nullptr;
  struct Newer {
    epd_attach_options_t known{};
    std::uint64_t unknown = 0;
  } newer;
  newer.known.size = sizeof(newer);
  newer.known.socket_path = daemon.socket_path().c_str();
  ASSERT_EQ(epd_session_attach(&newer.known, &session), EPD_OK) << epd_last_error();
  epd_session_detach(session);
  session = nullptr;
  newer.unknown = 1;
  EXPECT_EQ(epd_session_attach(&newer.known, &session), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("byte " + std::to_string(sizeof(epd_attach_options_t)));
  // An older caller without device and timeout: bytes after its struct are not read.
  newer.known.size = offsetof(epd_attach_options_t, device);
  newer.known.device = reinterpret_cast<const char*>(1);
  newer.known.timeout_ms = -1;
  ASSERT_EQ(epd_session_attach(&newer.known, &session), EPD_OK) << epd_last_error();

  epd_session_info_t info;
  epd_session_info_init(&info);
  info.size = offsetof(epd_session_info_t, device);
  ASSERT_EQ(epd_session_info(session, &info), EPD_OK);
  EXPECT_EQ(info.session_id, 77u);
  EXPECT_STREQ(info.device, "") << "written behind the caller's struct";
  info.size = 0;
  EXPECT_EQ(epd_session_info(session, &info), EPD_INVALID_ARGUMENT);
  epd_session_detach(session);
}

class ClientJoin : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error(); }
  void TearDown() override { epd_session_detach(session_); }
  epd_status_t join(const epd_group_config_t& config) {
    group_ = nullptr;
    return epd_group_join(session_, &config, &group_);
  }
  epd_status_t join_changed(const std::function<void(epd_group_config_t&)>& change) {
    epd_group_config_t config = small_config();
    change(config);
    return join(config);
  }

  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
};

TEST_F(ClientJoin, BuffersLieInTheArena) {
  epd_group_config_t config = small_config();
  config.payload = EPD_PAYLOAD_FP8_CAST;
  ASSERT_EQ(join(config), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_group_rank(group_), 1u);
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 3, &buffers), EPD_OK);
  EXPECT_NE(buffers.recv_scales, nullptr);
  FakeMember& member = daemon_.member();
  const abi::UserArenaLayout layout(member.shape);
  EXPECT_EQ(member.shape.depth, 4u) << "the default";
  static_cast<char*>(buffers.y)[5] = 'y';
  buffers.topk_weights[0] = 2.5f;
  EXPECT_EQ(*member.user.as<char>(layout.at(3, abi::Region::kY) + 5), 'y');
  EXPECT_EQ(*member.user.as<float>(layout.at(3, abi::Region::kTopkWeights)), 2.5f);
  EXPECT_EQ(epd_group_buffers(group_, 4, &buffers), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("slot is 4; allowed: 0 .. 3");
}

TEST_F(ClientJoin, ChecksEveryFieldByName) {
  const auto expect = [&](const char* text, const std::function<void(epd_group_config_t&)>& change) {
    EXPECT_EQ(join_changed(change), EPD_INVALID_ARGUMENT) << text;
    EXPECT_EQ(std::string(epd_last_error()).rfind(text, 0), 0u) << epd_last_error();
  };
  expect("name is NULL", [](auto& c) { c.name = nullptr; });
  expect("name is \"a b\"", [](auto& c) { c.name = "a b"; });
  expect("name is \"\"", [](auto& c) { c.name = ""; });
  expect("num_ranks is 0", [](auto& c) { c.num_ranks = 0; });
  expect("num_ranks is 1025", [](auto& c) { c.num_ranks = 1025; });
  expect("num_experts is 5; allowed: multiples of num_ranks, which is 2", [](auto& c) { c.num_experts = 5; });
  expect("num_experts is 4098; allowed: 1 .. 4096", [](auto& c) { c.num_experts = 4098; });
  expect("max_tokens is 0", [](auto& c) { c.max_tokens = 0; });
  expect("hidden is 100; allowed: multiples of 8", [](auto& c) { c.hidden = 100; });
  expect("hidden is 16512", [](auto& c) { c.hidden = 16512; });
  expect("topk is 33", [](auto& c) { c.topk = 33; });
  expect("depth is 17", [](auto& c) { c.depth = 17; });
  expect("rank is 2; allowed: 0 .. 1, or EPD_ANY_RANK (-1)", [](auto& c) { c.rank = 2; });
  expect("rank is -2", [](auto& c) { c.rank = -2; });
  expect("timeout_ms is -1; allowed: 1 or more milliseconds, or 0 (the daemon's default)",
         [](auto& c) { c.timeout_ms = -1; });
  const std::uint32_t nonsense = 7;
  expect("payload is 7", [&](auto& c) { std::memcpy(&c.payload, &nonsense, sizeof(nonsense)); });
  expect("index_type is 7", [&](auto& c) { std::memcpy(&c.index_type, &nonsense, sizeof(nonsense)); });
  expect("policy is 7", [&](auto& c) { std::memcpy(&c.policy, &nonsense, sizeof(nonsense)); });
  expect("layout is 7; allowed: 0 .. 2", [&](auto& c) { std::memcpy(&c.layout, &nonsense, 4); });
  expect("scale_format is 7", [&](auto& c) { std::memcpy(&c.scale_format, &nonsense, 4); });
  expect("scale_layout is 7; allowed: 0 .. 1", [&](auto& c) { std::memcpy(&c.scale_layout, &nonsense, 4); });
  expect("scale_layout is 1; allowed: 0 unless payload is 1 (fp8 cast) or 2 (fp8)",
         [](auto& c) { c.scale_layout = EPD_SCALE_LAYOUT_COLUMN_MAJOR; });
  expect("range_format is 7; allowed: 0 .. 1", [&](auto& c) { std::memcpy(&c.range_format, &nonsense, 4); });
  expect("range_format is 1; allowed: 0 unless layout is 1 (packed) or 2 (expert)",
         [](auto& c) { c.range_format = EPD_RANGE_FORMAT_PACKED64; });
  expect("expert_alignment is 257; allowed: 1 .. 256", [](auto& c) { c.expert_alignment = 257; });
  expect("num_biases is 3", [](auto& c) { c.num_biases = 3; });
  expect("num_handles is 4097", [](auto& c) { c.num_handles = 4097; });
  expect("max_recv_rows is 17; allowed: 0 .. 16", [](auto& c) { c.max_recv_rows = 17; });
  expect("sum_ranks is 3; allowed: 1 .. num_ranks, which is 2, or 0 (the default)",
         [](auto& c) { c.sum_ranks = 3; });
  expect("priority is 8; allowed: -8 .. 7", [](auto& c) { c.priority = 8; });
  expect("priority is -9", [](auto& c) { c.priority = -9; });
  EXPECT_EQ(epd_group_join(session_, nullptr, &group_), EPD_INVALID_ARGUMENT);
}

constexpr epd_row_format_t kCast{EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32};
constexpr epd_row_format_t kUe8m0{EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_UE8M0};

TEST_F(ClientJoin, ChecksMoreFormatsByName) {
  std::vector<epd_row_format_t> more;
  const auto expect = [&](
                          const char* text, std::vector<epd_row_format_t> formats,
                          const std::function<void(epd_group_config_t&)>& change = [](auto&) {}) {
    more = std::move(formats);
    const auto with_more = [&](epd_group_config_t& c) {
      c.more_formats = more.data();
      c.num_more_formats = static_cast<std::uint32_t>(more.size());
      change(c);
    };
    EXPECT_EQ(join_changed(with_more), EPD_INVALID_ARGUMENT) << text;
    EXPECT_STREQ(epd_last_error(), text);
  };
  epd_row_format_t nonsense = kCast;
  const std::uint32_t seven = 7;
  std::memcpy(&nonsense.payload, &seven, sizeof(seven));
  expect("more_formats[1].payload is 7; allowed: 0 .. 2", {kCast, nonsense});
  expect("more_formats[0].payload is 3; allowed: 0 .. 2", {{EPD_PAYLOAD_OPAQUE, EPD_SCALE_FORMAT_FLOAT32}});
  expect("more_formats[0].scale_format is 2; allowed: 0 unless payload is 1 (fp8 cast) or 2 (fp8)",
         {{EPD_PAYLOAD_BF16, EPD_SCALE_FORMAT_UE8M0}});
  expect(
      "more_formats[1].scale_format is 1; allowed: 0 (float32) and 2 (ue8m0) with payload 2 (fp8): scales "
      "are as given",
      {kCast, {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_FLOAT32_POW2}});
  expect("more_formats[1].payload is 0; allowed: another payload or scale_format than the group's own",
         {kCast, {EPD_PAYLOAD_BF16, EPD_SCALE_FORMAT_FLOAT32}});
  expect(
      "more_formats[2].payload is 1; allowed: another payload or scale_format than those of more_formats[0]",
      {kCast, kUe8m0, kCast});
  expect("num_more_formats is 4; allowed: 0 .. 3", {kCast, kUe8m0, kCast, kCast});
  expect("num_more_formats is 1; allowed: 0 with payload 3 (opaque)", {kCast}, [](auto& c) {
    c.payload = EPD_PAYLOAD_OPAQUE;
    c.opaque_bytes = 16;
  });
  expect("more_formats is NULL and num_more_formats 1", {kCast}, [](auto& c) { c.more_formats = nullptr; });
  expect("scale_layout is 1; allowed: 0 unless payload is 1 (fp8 cast) or 2 (fp8)", {},
         [](auto& c) { c.scale_layout = EPD_SCALE_LAYOUT_COLUMN_MAJOR; });
}

TEST_F(ClientJoin, MoreFormatsGoToTheDaemonAndRegionsHaveRoomForTheLargest) {
  const epd_row_format_t more[] = {kCast, kUe8m0};
  epd_group_config_t config = small_config();
  config.more_formats = more;
  config.num_more_formats = 2;
  config.scale_layout = EPD_SCALE_LAYOUT_COLUMN_MAJOR;
  ASSERT_EQ(join(config), EPD_OK) << epd_last_error();
  const abi::GroupShape& shape = daemon_.member().shape;
  ASSERT_EQ(shape.num_formats(), 3u);
  EXPECT_EQ(shape.format(0), (abi::RowFormat{abi::Payload::kBf16, abi::ScaleFormat::kFloat32}));
  EXPECT_EQ(shape.format(1), (abi::RowFormat{abi::Payload::kFp8Cast, abi::ScaleFormat::kFloat32}));
  EXPECT_EQ(shape.format(2), (abi::RowFormat{abi::Payload::kFp8, abi::ScaleFormat::kUe8m0}));
  epd_buffers_t b;
  epd_buffers_init(&b);
  ASSERT_EQ(epd_group_buffers(group_, 0, &b), EPD_OK);
  EXPECT_NE(b.x_scales, nullptr);
  EXPECT_NE(b.recv_scales, nullptr);
  const auto bytes = [&](epd_region_t region) {
    std::uint64_t found = 0;
    EXPECT_EQ(epd_region_bytes(&config, region, &found), EPD_OK);
    return found;
  };
  EXPECT_EQ(bytes(EPD_REGION_X), std::uint64_t{config.max_tokens} * config.hidden * 2);
  EXPECT_EQ(bytes(EPD_REGION_RECV_X), shape.recv_rows() * config.hidden * 2);
  EXPECT_EQ(bytes(EPD_REGION_X_SCALES), std::uint64_t{config.max_tokens} * 4) << "of ue8m0";
  EXPECT_EQ(bytes(EPD_REGION_RECV_SCALES), shape.scale_pitch() * config.hidden / 128 * 4);
}

TEST_F(ClientJoin, ADispatchNamesOneOfTheFormats) {
  const epd_row_format_t more[] = {kCast, kUe8m0};
  epd_group_config_t config = small_config();
  config.more_formats = more;
  config.num_more_formats = 2;
  ASSERT_EQ(join(config), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  epd_ticket_t ticket = 0;
  args.row_format = 3;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(), "row_format is 3; allowed: 0 .. 2");
  args.row_format = 1;
  std::vector<float> scales(config.max_tokens);
  epd_memory_t memory;
  epd_memory_init(&memory);
  memory.x_scales = scales.data();
  args.memory = &memory;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(), "memory.x_scales is given; allowed: NULL, row format 1 has no such rows");
  args.memory = nullptr;
  for (args.row_format = 0; args.row_format < 3; ++args.row_format) {
    args.slot = args.row_format;
    ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  }
}

TEST_F(ClientJoin, ZerosAreDefaultsAndTheRestGoesToTheDaemonAsGiven) {
  ASSERT_EQ(join(small_config()), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.member(0).shape.expert_alignment, 1u);
  EXPECT_EQ(daemon_.member(0).shape.sum_ranks, 0u) << "the daemon's to choose";
  EXPECT_EQ(epd_group_sum_ranks(group_), 2u) << "as it has chosen";
  epd_group_config_t config = small_config();
  config.payload = EPD_PAYLOAD_OPAQUE;
  config.opaque_bytes = 48;
  config.layout = EPD_LAYOUT_PACKED;
  config.expert_alignment = 16;
  config.num_biases = 2;
  config.num_handles = 5;
  config.max_recv_rows = 20;
  config.sum_ranks = 1;
  ASSERT_EQ(join(config), EPD_OK) << epd_last_error();
  const abi::GroupShape wanted{2,
                               4,
                               8,
                               128,
                               2,
                               4,
                               abi::Payload::kOpaque,
                               abi::IndexType::kInt32,
                               abi::LossPolicy::kFailFast,
                               abi::Layout::kPacked,
                               abi::ScaleFormat::kFloat32,
                               16,
                               48,
                               2,
                               5,
                               20,
                               1};
  EXPECT_EQ(daemon_.member(1).shape, wanted);
  EXPECT_EQ(epd_group_sum_ranks(group_), 1u);
}

TEST_F(ClientJoin, RegionsThatAGroupDoesNotHaveAreNull) {
  ASSERT_EQ(join(small_config()), EPD_OK) << epd_last_error();
  epd_buffers_t b;
  epd_buffers_init(&b);
  ASSERT_EQ(epd_group_buffers(group_, 0, &b), EPD_OK);
  EXPECT_EQ(b.recv_scales, nullptr);
  EXPECT_EQ(b.x_scales, nullptr);
  EXPECT_EQ(b.expert_offsets, nullptr);
  EXPECT_EQ(b.source_ranges, nullptr);
  EXPECT_EQ(b.bias[0], nullptr);
  EXPECT_NE(b.out_weights, nullptr);
  epd_group_config_t config = small_config();
  config.payload = EPD_PAYLOAD_FP8;
  config.layout = EPD_LAYOUT_EXPERT;
  config.num_biases = 1;
  ASSERT_EQ(join(config), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_group_buffers(group_, 2, &b), EPD_OK);
  const FakeMember& member = daemon_.member(1);
  const abi::UserArenaLayout layout(member.shape);
  *static_cast<int*>(b.x_scales) = 1;
  *b.source_ranges = 2;
  *static_cast<int*>(b.bias[0]) = 3;
  EXPECT_EQ(*member.user.as<int>(layout.at(2, abi::Region::kXScales)), 1);
  EXPECT_EQ(*member.user.as<int>(layout.at(2, abi::Region::kSourceRanges)), 2);
  EXPECT_EQ(*member.user.as<int>(layout.at(2, abi::Region::kBias0)), 3);
  EXPECT_EQ(b.bias[1], nullptr);
}

TEST_F(ClientJoin, PassesRefusalsOnAndGoesOn) {
  daemon_.set(with([](FakeSettings& s) {
    s.refuse_join = Status(StatusCode::kDeadlineExceeded, "ranks 0, 3 are missing");
  }));
  EXPECT_EQ(join(small_config()), EPD_DEADLINE_EXCEEDED);
  EXPECT_STREQ(epd_last_error(), "ranks 0, 3 are missing");
  daemon_.set({});
  EXPECT_EQ(join(small_config()), EPD_OK) << epd_last_error();
}

TEST_F(ClientJoin, WrongSizesAreRefusedAndLeftAgain) {
  daemon_.set(with([](FakeSettings& s) { s.more_user_bytes = 4096; }));
  EXPECT_EQ(join(small_config()), EPD_INTERNAL);
  EXPECT_EQ(daemon_.left(), 1u);
  daemon_.set(with([](FakeSettings& s) { s.less_board_bytes = 64; }));
  EXPECT_EQ(join(small_config()), EPD_INTERNAL);
  EXPECT_ERROR_HAS("the board");
  EXPECT_EQ(daemon_.left(), 2u);
}

TEST_F(ClientJoin, HangUpDuringJoin) {
  daemon_.set(with([](FakeSettings& s) { s.silent_join = true; }));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    daemon_.hang_up();
  });
  EXPECT_EQ(join(small_config()), EPD_DAEMON_LOST);
  killer.join();
  EXPECT_EQ(epd_session_check(session_), EPD_DAEMON_LOST);
}

TEST_F(ClientJoin, LeaveTellsTheDaemon) {
  ASSERT_EQ(join(small_config()), EPD_OK);
  epd_group_leave(group_);
  EXPECT_EQ(daemon_.left(), 1u);
  ASSERT_EQ(join(small_config()), EPD_OK);
  epd_session_detach(session_);
  session_ = nullptr;
  EXPECT_EQ(daemon_.left(), 2u) << "detach leaves";
}

}  // namespace
}  // namespace epd::testing
