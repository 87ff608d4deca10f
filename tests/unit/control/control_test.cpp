// The control plane in process, over a real unix socket, with a supervisor made of fixed answers.
#include "common/build_info.h"
#include "control_fixture.h"

#include <gmock/gmock.h>
#include <numeric>

namespace epd::control {
namespace {

using ::testing::HasSubstr;

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

TEST_F(ControlTest, ListsArrivePreciselyAsTheSupervisorHasFilledThem) {
  start();
  test::FakeControlFacade::Views filled;
  facade_.change([&](const auto& views) { filled = views; });
  const auto stub = control();
  const auto expect_same = [](const grpc::Status& status, const auto& got, const auto& expected) {
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(got.DebugString(), expected.DebugString());
    EXPECT_FALSE(expected.DebugString().empty());
  };
  v1::ListDevicesResponse devices;
  expect_same(call(*stub, &v1::Control::Stub::ListDevices, {}, devices), devices, filled.devices);
  v1::ListSessionsResponse sessions;
  expect_same(call(*stub, &v1::Control::Stub::ListSessions, {}, sessions), sessions, filled.sessions);
  v1::ListGroupsResponse groups;
  expect_same(call(*stub, &v1::Control::Stub::ListGroups, {}, groups), groups, filled.groups);
  v1::ListOperationsResponse operations;
  expect_same(call(*stub, &v1::Control::Stub::ListOperations, {}, operations), operations, filled.operations);
  v1::GetStatisticsResponse statistics;
  expect_same(call(*stub, &v1::Control::Stub::GetStatistics, {}, statistics), statistics, filled.statistics);
  v1::ListNodesResponse nodes;
  expect_same(call(*stub, &v1::Control::Stub::ListNodes, {}, nodes), nodes, filled.nodes);
  v1::ListFarEnginesResponse network;
  expect_same(call(*stub, &v1::Control::Stub::ListFarEngines, {}, network), network, filled.network);
  v1::GetConfigResponse config;
  expect_same(call(*stub, &v1::Control::Stub::GetConfig, {}, config), config, filled.config);
}

// The waits of all groups at once may be more than a client takes.
TEST_F(ControlTest, WaitsThatAreTooManyAreRefusedInWords) {
  start();
  facade_.change([](test::FakeControlFacade::Views& views) {
    for (int i = 0; i < 300; ++i) {
      v1::GroupWaits& group = *views.waits.add_groups();
      group.set_name("wide");
      for (int rank = 0; rank < 1024; ++rank) group.add_ranks()->set_device("host:" + std::to_string(rank));
    }
  });
  v1::GetWaitsRequest all;
  v1::GetWaitsResponse waits;
  const grpc::Status status = call(*control(), &v1::Control::Stub::GetWaits, all, waits);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the waits of 301 groups are "));
  EXPECT_THAT(status.error_message(), HasSubstr("allowed: 3145728: name one group"));
}

// Each method has its own times; what was refused is counted by its status.
TEST_F(ControlTest, CallsAreTimed) {
  start();
  v1::GetStatusResponse response;
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetStatus, v1::GetStatusRequest(), response).ok());
  v1::GetOperationRequest nonsense;
  nonsense.set_id("x");
  v1::GetOperationResponse operation;
  EXPECT_FALSE(call(*control(), &v1::Control::Stub::GetOperation, nonsense, operation).ok());
  const CallTimes::All all = server_->times().all();
  ASSERT_EQ(all.size(), 2u);
  const CallTimes::Calls& well = all.at("GetStatus");
  EXPECT_EQ(std::accumulate(well.buckets.begin(), well.buckets.end(), std::uint64_t{0}), 3u);
  EXPECT_GT(well.seconds, 0);
  EXPECT_TRUE(well.failed.empty());
  EXPECT_EQ(all.at("GetOperation").failed.at("INVALID_ARGUMENT"), 1u);
}

TEST_F(ControlTest, ReadersMayLookAndChangeNothing) {
  start();
  facade_.allow(supervisor::Right::kRead);
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
  v1::ReloadConfigResponse reloaded;
  refused(call(*stub, &v1::Control::Stub::ReloadConfig, {}, reloaded), "reload the configuration");
  v1::SetOptionsResponse options_set;
  refused(call(*stub, &v1::Control::Stub::SetOptions, {}, options_set), "set options");
  EXPECT_TRUE(facade_.asked().empty());
  EXPECT_FALSE(facade_.drained().has_value());
  v1::GetStatusResponse status;
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::GetStatus, {}, status).ok());
  EXPECT_TRUE(check("control").status.ok());
}

TEST_F(ControlTest, WhoMayNothingSeesNothing) {
  start();
  facade_.allow(supervisor::Right::kNone);
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
  v1::ListNodesResponse nodes;
  v1::GetVersionResponse version;
  refused(call(*stub, &v1::Control::Stub::ListNodes, {}, nodes));
  v1::ListFarEnginesResponse network;
  refused(call(*stub, &v1::Control::Stub::ListFarEngines, {}, network));
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

TEST_F(ControlTest, AStatusAVersionAndAHealthCheckAskTheSupervisorOnce) {
  start();
  server_->set_serving(true);
  v1::GetStatusResponse status;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetStatus, {}, status).ok());
  EXPECT_EQ(facade_.questions(), 1);
  v1::GetVersionResponse version;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetVersion, {}, version).ok());
  EXPECT_EQ(facade_.questions(), 2);
  for (const char* name : {"", "control", "membership", "device/host:0"}) {
    const int before = facade_.questions();
    EXPECT_EQ(check(name).health, HealthCheckResponse::SERVING) << name;
    EXPECT_EQ(facade_.questions(), before + 1) << name;
  }
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
  EXPECT_EQ(response.version(), build_info().version);
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
    views.sessions.mutable_sessions(1)->set_library("\xff\xfe\xe2\x82 ok \xe2\x82\xac \xed\xa0\x80");
    v1::CudaDevice& cuda = *views.devices.mutable_devices(0)->mutable_cuda();
    cuda.add_unreachable("as it is");
    cuda.add_unreachable("\xff");
    views.daemon.set_socket_path("/\xff");
  });
  start();
  v1::ListSessionsResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListSessions, {}, response).ok());
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(response.sessions(1).library(), bad + bad + bad + bad + " ok \xe2\x82\xac " + bad + bad + bad);
  v1::GetStatusResponse status;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetStatus, {}, status).ok());
  EXPECT_EQ(status.daemon().socket_path(), "/" + bad);
  EXPECT_EQ(status.devices(0).cuda().unreachable(0), "as it is");
  EXPECT_EQ(status.devices(0).cuda().unreachable(1), bad);
}

}  // namespace
}  // namespace epd::control
