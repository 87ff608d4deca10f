// The control plane in process, over a real unix socket, with a supervisor made of fixed answers.
#include "control_fixture.h"

namespace epd {
namespace {

TEST_F(ControlTest, GetStatusTellsTheDaemonAndItsDevicesInOrder) {
  start();
  v1::GetStatusResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetStatus, {}, response).ok());
  const v1::DaemonStatus& daemon = response.daemon();
  EXPECT_EQ(daemon.version(), "0.1.0");
  EXPECT_EQ(daemon.boot_id(), "00112233445566778899aabbccddeeff");
  EXPECT_EQ(daemon.pid(), ::getpid());
  EXPECT_EQ(daemon.uptime_ms(), 3'723'000u);
  EXPECT_EQ(daemon.state(), v1::DAEMON_STATE_SERVING);
  EXPECT_EQ(daemon.sessions(), 2u);
  EXPECT_EQ(daemon.groups(), 2u);
  EXPECT_EQ(daemon.arena_bytes(), std::uint64_t{600} << 20);
  EXPECT_EQ(daemon.sessions_total(), 17u);
  EXPECT_EQ(daemon.sessions_refused(), 1u);
  EXPECT_EQ(daemon.config_generation(), 1u);
  ASSERT_EQ(response.devices_size(), 2);
  EXPECT_EQ(response.devices(0).name(), "host:0");
  EXPECT_EQ(response.devices(1).name(), "host:1");
}

TEST_F(ControlTest, ListDevicesCarriesEveryField) {
  facade_.change([](auto& views) {
    views.devices[0].state = DeviceState::kRestarting;  // host:1
    views.devices[0].restarts = 3;
    views.devices[0].last_exit = "signal 9";
    views.devices[0].sleeping = true;
    views.devices[0].kernel_stops[abi::histogram_bucket(3)] = 1;
    views.devices[0].kernel_stops[abi::histogram_bucket(200)] = 2;
    views.devices[0].kernel_stop_max_us = 214;
    views.devices[0].times_stuck = 3;
  });
  start();
  v1::ListDevicesResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListDevices, {}, response).ok());
  ASSERT_EQ(response.devices_size(), 2);
  EXPECT_EQ(response.devices(0).state(), v1::DEVICE_STATE_READY);
  const v1::Device& device = response.devices(1);
  EXPECT_EQ(device.state(), v1::DEVICE_STATE_RESTARTING);
  EXPECT_EQ(device.engine_pid(), 4242);
  EXPECT_EQ(device.restarts(), 3u);
  EXPECT_EQ(device.last_exit(), "signal 9");
  EXPECT_EQ(device.sms(), 2u);
  EXPECT_EQ(device.sessions(), 1u);
  EXPECT_EQ(device.heartbeat_age_ms(), 3u);
  EXPECT_TRUE(device.sleeping());
  EXPECT_EQ(device.ops_submitted(), 1200u);
  EXPECT_EQ(device.ops_completed(), 1190u);
  EXPECT_EQ(device.ops_failed(), 8u);
  EXPECT_EQ(device.bytes_dispatched(), std::uint64_t{5} << 30);
  EXPECT_EQ(device.bytes_combined(), std::uint64_t{3} << 20);
  EXPECT_EQ(device.submissions_refused(), 2u);
  EXPECT_FALSE(response.devices(0).has_kernel_stops()) << "none has been told to stop";
  EXPECT_EQ(device.kernel_stops().count(), 3u);
  EXPECT_GE(device.kernel_stops().p50_us(), 192u);
  EXPECT_LE(device.kernel_stops().p50_us(), 214u);
  EXPECT_EQ(device.kernel_stop_max_us(), 214u);
  EXPECT_EQ(device.times_stuck(), 3u);
}

TEST_F(ControlTest, DevicesAreOrderedByNumber) {
  facade_.change([](auto& views) {
    views.devices.clear();
    for (const char* name : {"host:10", "host:9", "cuda:11", "host:0"}) {
      views.devices.emplace_back();
      views.devices.back().name = name;
    }
  });
  start();
  v1::ListDevicesResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListDevices, {}, response).ok());
  std::vector<std::string> names;
  for (const auto& device : response.devices()) names.push_back(device.name());
  EXPECT_EQ(names, (std::vector<std::string>{"cuda:11", "host:0", "host:9", "host:10"}));
}

TEST_F(ControlTest, ListSessionsCarriesEveryField) {
  start();
  v1::ListSessionsResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListSessions, {}, response).ok());
  ASSERT_EQ(response.sessions_size(), 2);
  const v1::Session& session = response.sessions(0);
  EXPECT_EQ(session.session_id(), 11u);
  EXPECT_EQ(response.sessions(1).session_id(), 12u);
  EXPECT_EQ(session.uid(), 1000u);
  EXPECT_EQ(session.gid(), 100u);
  EXPECT_EQ(session.pid(), 7011);
  EXPECT_EQ(session.device(), "host:0");
  EXPECT_EQ(session.library(), "libepd 0.1.0");
  EXPECT_EQ(session.age_ms(), 65'000u);
  EXPECT_EQ(session.groups(), 1u);
  EXPECT_EQ(session.arena_bytes(), std::uint64_t{300} << 20);
  EXPECT_EQ(session.claimed_pid(), 5);
  EXPECT_EQ(session.claimed_host(), "node7");
}

// Whoever could open the socket could drain the daemon.
TEST_F(ControlTest, ReadersMayLookAndChangeNothing) {
  start();
  facade_.allow(Right::kRead);
  const auto stub = control();
  const auto refused = [](const grpc::Status& status, const std::string& what) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << what;
    EXPECT_NE(status.error_message().find("user " + std::to_string(::geteuid()) + " may not " + what),
              std::string::npos)
        << status.error_message();
    v1::ErrorStatus error;
    EXPECT_TRUE(error.ParseFromString(status.error_details()) && error.details_size() == 1)
        << "the daemon's own";
  };
  v1::DrainResponse drain;
  refused(call(*stub, &v1::Control::Stub::Drain, {}, drain), "drain");
  v1::SetDeviceRequest device;
  device.set_sms(1);
  v1::SetDeviceResponse device_set;
  refused(call(*stub, &v1::Control::Stub::SetDevice, device, device_set), "set a device");
  v1::SetGroupResponse group_set;
  refused(call(*stub, &v1::Control::Stub::SetGroup, {}, group_set), "set a group");
  v1::EvictSessionResponse session;
  refused(call(*stub, &v1::Control::Stub::EvictSession, {}, session), "evict a session");
  v1::EvictRankResponse rank;
  refused(call(*stub, &v1::Control::Stub::EvictRank, {}, rank), "evict a rank");
  v1::RestartDeviceResponse restarted;
  refused(call(*stub, &v1::Control::Stub::RestartDevice, {}, restarted), "restart a device");
  EXPECT_TRUE(facade_.asked().empty());
  EXPECT_FALSE(facade_.drained().has_value());
  v1::GetStatusResponse status;
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::GetStatus, {}, status).ok());
  EXPECT_TRUE(check("control").status.ok());
}

TEST_F(ControlTest, WhoMayNothingSeesNothing) {
  start();
  facade_.allow(Right::kNone);
  const auto stub = control();
  const auto refused = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << status.error_message();
  };
  v1::GetStatusResponse status;
  v1::ListDevicesResponse devices;
  v1::ListSessionsResponse sessions;
  v1::ListGroupsResponse groups;
  v1::ListOperationsResponse operations;
  v1::GetOperationResponse operation;
  v1::GetStatisticsResponse statistics;
  v1::GetConfigResponse config;
  v1::GetVersionResponse version;
  refused(call(*stub, &v1::Control::Stub::GetStatus, {}, status));
  refused(call(*stub, &v1::Control::Stub::ListDevices, {}, devices));
  refused(call(*stub, &v1::Control::Stub::ListSessions, {}, sessions));
  refused(call(*stub, &v1::Control::Stub::ListGroups, {}, groups));
  refused(call(*stub, &v1::Control::Stub::ListOperations, {}, operations));
  refused(call(*stub, &v1::Control::Stub::GetOperation, {}, operation));
  refused(call(*stub, &v1::Control::Stub::GetStatistics, {}, statistics));
  refused(call(*stub, &v1::Control::Stub::GetConfig, {}, config));
  refused(call(*stub, &v1::Control::Stub::GetVersion, {}, version));
  refused(check("").status);
  grpc::ClientContext context;
  limit(context);
  const auto watch = stub->WatchEvents(&context, {});
  v1::WatchEventsResponse events;
  EXPECT_FALSE(watch->Read(&events));
  refused(watch->Finish());
}

TEST_F(ControlTest, TheKernelTellsWhoChangesSomething) {
  start();
  v1::RestartDeviceRequest request;
  request.set_device("host:1");
  v1::RestartDeviceResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::RestartDevice, request, response).ok());
  EXPECT_EQ(facade_.asked(), (std::vector<std::string>{"restart device host:1"}));
  EXPECT_EQ(facade_.last_operator().pid, ::getpid());
  EXPECT_EQ(facade_.last_operator().uid, ::geteuid());
  EXPECT_FALSE(facade_.last_operator().gids.empty());
}

TEST_F(ControlTest, ListGroupsCarriesShapeMembersAndMissingRanks) {
  start();
  v1::ListGroupsResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListGroups, {}, response).ok());
  ASSERT_EQ(response.groups_size(), 2);
  const v1::Group& group = response.groups(0);
  EXPECT_EQ(group.group_id(), 9u);
  EXPECT_EQ(group.name(), "layer-experts");
  EXPECT_EQ(group.state(), v1::GROUP_STATE_ACTIVE);
  EXPECT_EQ(group.shape().num_ranks(), 2u);
  EXPECT_EQ(group.shape().num_experts(), 256u);
  EXPECT_EQ(group.shape().max_tokens(), 4096u);
  EXPECT_EQ(group.shape().hidden(), 7168u);
  EXPECT_EQ(group.shape().topk(), 8u);
  EXPECT_EQ(group.shape().depth(), 4u);
  EXPECT_EQ(group.shape().payload(), v1::PAYLOAD_FP8_CAST);
  EXPECT_EQ(group.shape().index_type(), v1::INDEX_TYPE_INT64);
  EXPECT_EQ(group.shape().policy(), v1::LOSS_POLICY_FAIL_FAST);
  EXPECT_EQ(group.shape().layout(), v1::LAYOUT_PACKED);
  EXPECT_EQ(group.shape().scale_format(), v1::SCALE_FORMAT_UE8M0);
  EXPECT_EQ(group.shape().expert_alignment(), 128u);
  EXPECT_EQ(group.shape().num_biases(), 2u);
  EXPECT_EQ(group.shape().num_handles(), 3u);
  EXPECT_EQ(group.shape().max_recv_rows(), 9000u);
  EXPECT_EQ(group.sms(), 2u);
  EXPECT_EQ(group.epoch(), 3u);
  EXPECT_EQ(group.age_ms(), 64'000u);
  EXPECT_EQ(group.cause(), "engine of host:1 restarted");
  ASSERT_EQ(group.members_size(), 2);
  EXPECT_EQ(group.members(0).rank(), 0u);
  EXPECT_EQ(group.members(0).session_id(), 11u);
  EXPECT_EQ(group.members(1).device(), "host:1");
  EXPECT_TRUE(group.members(1).by_stream());
  EXPECT_FALSE(group.members(0).by_stream());
  const v1::Group& forming = response.groups(1);
  EXPECT_EQ(forming.state(), v1::GROUP_STATE_FORMING);
  EXPECT_EQ(forming.shape().payload(), v1::PAYLOAD_BF16);
  EXPECT_EQ(forming.shape().index_type(), v1::INDEX_TYPE_INT32);
  EXPECT_TRUE(forming.members(0).gone());
  EXPECT_EQ(std::vector<std::uint32_t>(forming.missing_ranks().begin(), forming.missing_ranks().end()),
            (std::vector<std::uint32_t>{0, 1, 3}));
}

TEST_F(ControlTest, EveryGroupStateStageAndOriginOfTheFacadeHasItsEnumerator) {
  const std::vector<std::string> states{"forming", "starting", "active", "breaking", "lost", "strange"};
  const std::vector<std::string> stages{"planning", "wait_ready", "moving", "wait_arrived", "breaking", ""};
  const std::vector<std::string> ops{"noop", "dispatch", "combine", "", "Dispatch ", "x"};
  const std::vector<std::string> origins{"default", "file", "flag", "environment"};
  facade_.change([&](auto& views) {
    views.groups.assign(states.size(), {});
    views.operations.assign(stages.size(), {});
    views.config.assign(origins.size(), {});
    for (std::size_t i = 0; i < states.size(); ++i) {
      views.groups[i].id = i;
      views.groups[i].state = states[i];
      views.operations[i].op_index = i;
      views.operations[i].stage = stages[i];
      views.operations[i].op = ops[i];
    }
    for (std::size_t i = 0; i < origins.size(); ++i) {
      views.config[i] = {"key." + std::to_string(i), "", origins[i], false};
    }
  });
  start();
  v1::ListGroupsResponse groups;
  v1::ListOperationsResponse operations;
  v1::GetConfigResponse config;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListGroups, {}, groups).ok());
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListOperations, {}, operations).ok());
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetConfig, {}, config).ok());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(groups.groups(i).state(), i + 1);
    EXPECT_EQ(operations.operations(i).stage(), i + 1);
  }
  EXPECT_EQ(groups.groups(5).state(), v1::GROUP_STATE_UNSPECIFIED);
  EXPECT_EQ(operations.operations(5).stage(), v1::OPERATION_STAGE_UNSPECIFIED);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(operations.operations(i).op(), i + 1);
  for (int i = 3; i < 6; ++i) EXPECT_EQ(operations.operations(i).op(), v1::OPERATION_KIND_UNSPECIFIED);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(config.entries(i).origin(), i + 1);
}

TEST_F(ControlTest, ListOperationsCarriesEveryField) {
  start();
  v1::ListOperationsResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListOperations, {}, response).ok());
  ASSERT_EQ(response.operations_size(), 2);
  const v1::Operation& operation = response.operations(0);
  EXPECT_EQ(operation.device(), "host:0");
  EXPECT_EQ(operation.session_id(), 11u);
  EXPECT_EQ(operation.group_id(), 9u);
  EXPECT_EQ(operation.ticket(), 500u);
  EXPECT_EQ(operation.op_index(), 77u);
  EXPECT_EQ(operation.op(), v1::OPERATION_KIND_DISPATCH);
  EXPECT_EQ(operation.stage(), v1::OPERATION_STAGE_WAIT_READY);
  EXPECT_EQ(operation.rank(), 0u);
  EXPECT_EQ(operation.slot(), 1u);
  EXPECT_EQ(operation.num_tokens(), 128u);
  EXPECT_EQ(operation.waiting_for(), 1);
  EXPECT_EQ(operation.age_us(), 1500u);
  EXPECT_EQ(response.operations(1).waiting_for(), -1);
}

TEST_F(ControlTest, GetConfigIsOrderedByKey) {
  start();
  v1::GetConfigResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetConfig, {}, response).ok());
  ASSERT_EQ(response.entries_size(), 2);
  EXPECT_EQ(response.entries(0).key(), "device.host");
  EXPECT_EQ(response.entries(0).origin(), v1::CONFIG_ORIGIN_FLAG);
  EXPECT_FALSE(response.entries(0).reloadable());
  EXPECT_EQ(response.entries(1).value(), "64");
  EXPECT_TRUE(response.entries(1).reloadable());
}

TEST_F(ControlTest, DrainPassesTheTimeoutOn) {
  start();
  v1::DrainRequest request;
  request.set_timeout_ms(1234);
  v1::DrainResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::Drain, request, response).ok());
  EXPECT_EQ(facade_.drained(), 1234u);
  EXPECT_EQ(response.daemon().state(), v1::DAEMON_STATE_DRAINING);
}

TEST_F(ControlTest, GetVersionTellsTheAbi) {
  start();
  v1::GetVersionResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetVersion, {}, response).ok());
  EXPECT_EQ(response.version(), "0.1.0");
  EXPECT_EQ(response.abi_version_min(), abi::kAbiVersionMin);
  EXPECT_EQ(response.abi_version_max(), abi::kAbiVersion);
  EXPECT_EQ(std::stoull(response.layout_hash(), nullptr, 16), abi::layout_hash());
  EXPECT_EQ(response.grpc_version(), grpc::Version());
}

TEST_F(ControlTest, EveryStatusKeepsItsNameAndMessage) {
  const std::vector<std::pair<StatusCode, grpc::StatusCode>> expected{
      {StatusCode::kWouldBlock, grpc::StatusCode::UNAVAILABLE},
      {StatusCode::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT},
      {StatusCode::kNotFound, grpc::StatusCode::NOT_FOUND},
      {StatusCode::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED},
      {StatusCode::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED},
      {StatusCode::kUnsupported, grpc::StatusCode::UNIMPLEMENTED},
      {StatusCode::kVersionMismatch, grpc::StatusCode::FAILED_PRECONDITION},
      {StatusCode::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED},
      {StatusCode::kRankLost, grpc::StatusCode::ABORTED},
      {StatusCode::kEngineRestarted, grpc::StatusCode::ABORTED},
      {StatusCode::kDaemonLost, grpc::StatusCode::UNAVAILABLE},
      {StatusCode::kAborted, grpc::StatusCode::ABORTED},
      {StatusCode::kInternal, grpc::StatusCode::INTERNAL},
  };
  ASSERT_EQ(expected.size() + 1, static_cast<std::size_t>(kNumStatusCodes));
  start();
  for (const auto& [code, grpc_code] : expected) {
    facade_.fail({code, "broken \xff for a reason"});
    v1::GetStatusResponse response;
    const grpc::Status status = call(*control(), &v1::Control::Stub::GetStatus, {}, response);
    EXPECT_EQ(status.error_code(), grpc_code) << status_name(code);
    EXPECT_EQ(status.error_message(), "broken \xef\xbf\xbd for a reason");
    v1::ErrorStatus error;
    v1::ErrorInfo info;
    ASSERT_TRUE(error.ParseFromString(status.error_details())) << status_name(code);
    EXPECT_EQ(error.code(), static_cast<int>(grpc_code));
    EXPECT_EQ(error.message(), status.error_message());
    ASSERT_EQ(error.details_size(), 1);
    ASSERT_TRUE(error.details(0).UnpackTo(&info));
    EXPECT_EQ(info.status(), status_name(code));
  }
}

// It did not fit into the trailer: the caller read "received metadata size exceeds hard limit".
TEST_F(ControlTest, ARefusalThatQuotesALongValueArrives) {
  start();
  facade_.fail(not_found("device is \"" + std::string(60'000, 'x') + "\"; allowed: host:0"));
  v1::GetStatusResponse response;
  const grpc::Status status = call(*control(), &v1::Control::Stub::GetStatus, {}, response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << status.error_message();
  EXPECT_TRUE(status.error_message().starts_with("device is \"xxx")) << status.error_message();
  EXPECT_TRUE(status.error_message().ends_with("xxx\"; allowed: host:0")) << status.error_message();
  EXPECT_LT(status.error_message().size(), 1000u);
  v1::GetOperationRequest request;
  request.set_id(std::string(60'000, ':'));
  v1::GetOperationResponse operation;
  EXPECT_EQ(call(*control(), &v1::Control::Stub::GetOperation, request, operation).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ControlTest, EveryCallReportsTheFacadesError) {
  start();
  facade_.fail({StatusCode::kDeadlineExceeded, "the loop has not answered"});
  const auto stub = control();
  const auto expect_error = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_EQ(status.error_message(), "the loop has not answered");
  };
  v1::ListDevicesResponse devices;
  v1::ListSessionsResponse sessions;
  v1::ListGroupsResponse groups;
  v1::ListOperationsResponse operations;
  v1::GetConfigResponse config;
  v1::DrainResponse drain;
  v1::GetVersionResponse version;
  expect_error(call(*stub, &v1::Control::Stub::ListDevices, {}, devices));
  expect_error(call(*stub, &v1::Control::Stub::ListSessions, {}, sessions));
  expect_error(call(*stub, &v1::Control::Stub::ListGroups, {}, groups));
  expect_error(call(*stub, &v1::Control::Stub::ListOperations, {}, operations));
  expect_error(call(*stub, &v1::Control::Stub::GetConfig, {}, config));
  expect_error(call(*stub, &v1::Control::Stub::Drain, {}, drain));
  expect_error(call(*stub, &v1::Control::Stub::GetVersion, {}, version));
  EXPECT_FALSE(facade_.drained().has_value());
}

TEST_F(ControlTest, BytesThatAreNotUtf8DoNotMakeAListUnreadable) {
  facade_.change([](auto& views) {
    views.sessions[0].library = "\xff\xfe\xe2\x82 ok \xe2\x82\xac \xed\xa0\x80";  // session 12
  });
  start();
  v1::ListSessionsResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListSessions, {}, response).ok());
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(response.sessions(1).library(), bad + bad + bad + bad + " ok \xe2\x82\xac " + bad + bad + bad);
}

}  // namespace
}  // namespace epd
