// The control plane's tools for operators: one operation, statistics, events, settings, evictions.
#include "control_fixture.h"

#include <future>
#include <thread>
#include <vector>

namespace epd::control {
namespace {

TEST_F(ControlTest, GetOperationFindsByTheIdThatListOperationsGives) {
  start();
  v1::ListOperationsResponse list;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::ListOperations, {}, list).ok());
  EXPECT_EQ(list.operations(0).id(), "11:500");
  EXPECT_EQ(list.operations(0).waiting_us(), 900u);
  EXPECT_EQ(list.operations(0).deadline_in_us(), 29'000'000);
  EXPECT_EQ(list.operations(0).epoch(), 3u);
  v1::GetOperationRequest request;
  request.set_id(list.operations(0).id());
  v1::GetOperationResponse response;
  ASSERT_TRUE(call(*control(), &v1::Control::Stub::GetOperation, request, response).ok());
  EXPECT_EQ(response.group(), "layer-experts");
  EXPECT_EQ(response.pid(), 7011);
  ASSERT_EQ(response.waits_size(), 1);
  EXPECT_EQ(response.waits(0).session_id(), 12u);
  EXPECT_TRUE(response.waits(0).client_stopped());
  EXPECT_FALSE(response.waits(0).submitted());
  EXPECT_EQ(response.waits(0).device_state(), v1::DEVICE_STATE_READY);
  ASSERT_EQ(response.operation().stages_size(), 2);
  EXPECT_EQ(response.operation().stages(1).stage(), "planning");
  EXPECT_EQ(response.operation().stages(1).after_us(), 3u);
}

TEST_F(ControlTest, AnIdOfAnotherFormIsRefusedWithTheForm) {
  start();
  for (const char* id : {"", ":", "11", "11:", ":500", "11:500:1", "11:-500", "x:y", " 11:500"}) {
    v1::GetOperationRequest request;
    request.set_id(id);
    v1::GetOperationResponse response;
    const grpc::Status status = call(*control(), &v1::Control::Stub::GetOperation, request, response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << id;
    EXPECT_NE(status.error_message().find("allowed: SESSION:TICKET"), std::string::npos);
  }
  v1::GetOperationRequest request;
  request.set_id("11:501");
  v1::GetOperationResponse response;
  EXPECT_EQ(call(*control(), &v1::Control::Stub::GetOperation, request, response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

struct Heard {
  std::vector<std::uint64_t> sequences;
  std::uint64_t lost = 0;
  grpc::Status status;
};

// Until the stream ends, or `enough` events have come.
Heard listen(v1::Control::Stub& stub, std::uint64_t since, bool follow, std::size_t enough = 1000) {
  grpc::ClientContext context;
  limit(context);
  v1::WatchEventsRequest request;
  request.set_since(since);
  request.set_follow(follow);
  const auto reader = stub.WatchEvents(&context, request);
  Heard heard;
  v1::WatchEventsResponse response;
  while (heard.sequences.size() < enough && reader->Read(&response)) {
    heard.lost += response.lost();
    for (const auto& event : response.events()) heard.sequences.push_back(event.sequence());
  }
  if (heard.sequences.size() >= enough) context.TryCancel();
  heard.status = reader->Finish();
  return heard;
}

TEST_F(ControlTest, EventsComeInOrderAndFromWhereTheReaderStopped) {
  start();
  const auto stub = control();
  EXPECT_EQ(listen(*stub, 0, false).sequences, (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_EQ(listen(*stub, 2, false).sequences, (std::vector<std::uint64_t>{3}));
  const Heard none = listen(*stub, 3, false);
  EXPECT_TRUE(none.sequences.empty() && none.status.ok());
  const Heard beyond = listen(*stub, 4, false);
  EXPECT_EQ(beyond.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << "another run's number";
}

TEST_F(ControlTest, AReaderThatComesTooLateIsToldHowManyItLost) {
  start();  // the fake remembers 8
  for (int i = 0; i < 20; ++i) facade_.event_log().add({});
  const auto stub = control();
  const Heard heard = listen(*stub, 5, false);
  EXPECT_EQ(heard.lost, 10u);
  ASSERT_EQ(heard.sequences.size(), 8u);
  EXPECT_EQ(heard.sequences.front(), 16u);
}

TEST_F(ControlTest, AFollowerHearsWhatHappensNow) {
  start();
  auto hearing = std::async(std::launch::async, [&] { return listen(*control(), 3, true, 2); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  facade_.event_log().add({});
  facade_.event_log().add({});
  ASSERT_EQ(hearing.wait_for(kHang), std::future_status::ready);
  EXPECT_EQ(hearing.get().sequences, (std::vector<std::uint64_t>{4, 5}));
}

TEST_F(ControlTest, FollowersThatDoNotReadHoldUpNobody) {
  start();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>>> readers;
  v1::WatchEventsRequest request;
  request.set_follow(true);
  const auto stub = control();
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    limit(*contexts.back());
    readers.push_back(stub->WatchEvents(contexts.back().get(), request));
    v1::WatchEventsResponse response;
    ASSERT_TRUE(readers.back()->Read(&response));
  }
  // Far more than the streams' windows hold; none of it waits for them.
  Event large;
  large.text = std::string(4096, 'x');
  for (int i = 0; i < 2000; ++i) facade_.event_log().add(large);
  v1::GetStatusResponse response;
  EXPECT_TRUE(call(*control(), &v1::Control::Stub::GetStatus, {}, response).ok());
  EXPECT_EQ(listen(*stub, 2000, false).sequences.back(), 2003u);
  for (auto& context : contexts) context->TryCancel();
  for (auto& reader : readers) (void)reader->Finish();
}

TEST_F(ControlTest, SettingsAndEvictionsArePassedOnAsTheyAre) {
  start();
  const auto stub = control();
  v1::SetDeviceRequest device;
  v1::SetDeviceResponse device_done;
  device.set_device("host:0");
  EXPECT_EQ(call(*stub, &v1::Control::Stub::SetDevice, device, device_done).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT)
      << "nothing to set";
  device.set_sms(4);
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::SetDevice, device, device_done).ok());
  v1::SetGroupRequest group;
  v1::SetGroupResponse group_done;
  group.set_group("9");
  group.set_priority(-3);
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::SetGroup, group, group_done).ok());
  group.set_sms(0);
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::SetGroup, group, group_done).ok());
  v1::EvictSessionRequest session;
  v1::EvictSessionResponse session_done;
  session.set_session_id(11);
  session.set_reason("slow");
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::EvictSession, session, session_done).ok());
  v1::EvictRankRequest rank;
  v1::EvictRankResponse rank_done;
  rank.set_group("late");
  rank.set_rank(2);
  rank.set_reason("why not");
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::EvictRank, rank, rank_done).ok());
  EXPECT_EQ(facade_.asked(),
            (std::vector<std::string>{"set device host:0 sms=4", "set group 9 priority=-3",
                                      "set group 9 sms=0 priority=-3", "evict session 11 slow",
                                      "evict group late rank 2 why not"}));
  facade_.fail(invalid_argument("sms is 99; allowed: 1..8"));
  EXPECT_EQ(call(*stub, &v1::Control::Stub::SetDevice, device, device_done).error_message(),
            "sms is 99; allowed: 1..8");
}

TEST_F(ControlTest, OptionsAreSetAndUnsetAllTogether) {
  start();
  const auto stub = control();
  v1::SetOptionsRequest request;
  v1::SetOptionsResponse response;
  const grpc::Status nothing = call(*stub, &v1::Control::Stub::SetOptions, request, response);
  EXPECT_EQ(nothing.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(nothing.error_message().find("allowed: log.level, limits.*"), std::string::npos)
      << nothing.error_message();
  (*request.mutable_values())["log.level"] = "debug";
  request.add_unset("limits.max_groups");
  ASSERT_TRUE(call(*stub, &v1::Control::Stub::SetOptions, request, response).ok());
  EXPECT_EQ(response.changes_size(), 2);
  EXPECT_EQ(facade_.asked(),
            std::vector<std::string>{"set options limits.max_groups=(unset) log.level=debug"});
  EXPECT_EQ(facade_.last_operator().uid, ::geteuid());
  request.add_unset("log.level");
  const grpc::Status both = call(*stub, &v1::Control::Stub::SetOptions, request, response);
  EXPECT_EQ(both.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(both.error_message().find("log.level"), std::string::npos) << both.error_message();
}

TEST_F(ControlTest, WhatIsSetIsNotAlsoUnset) {
  start();
  const auto stub = control();
  v1::SetDeviceRequest device;
  v1::SetDeviceResponse device_set;
  device.set_device("host:0");
  device.set_unset_sms(true);
  EXPECT_TRUE(call(*stub, &v1::Control::Stub::SetDevice, device, device_set).ok());
  device.set_sms(3);
  EXPECT_EQ(call(*stub, &v1::Control::Stub::SetDevice, device, device_set).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  v1::SetGroupRequest group;
  v1::SetGroupResponse group_set;
  group.set_group("g");
  group.set_priority(1);
  group.set_unset_priority(true);
  EXPECT_EQ(call(*stub, &v1::Control::Stub::SetGroup, group, group_set).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(facade_.asked(), std::vector<std::string>{"set device host:0 sms=(unset)"});
}

TEST_F(ControlTest, AReloadTellsWhatHasChangedOrWhyNot) {
  start();
  const auto stub = control();
  v1::ReloadConfigResponse response;
  ASSERT_TRUE(call(*stub, &v1::Control::Stub::ReloadConfig, {}, response).ok());
  EXPECT_EQ(response.generation(), 2u);
  ASSERT_EQ(response.changes_size(), 1);
  EXPECT_EQ(response.changes(0).key(), "limits.max_sessions");
  facade_.fail(invalid_argument("limits.max_sessions is \"0\"; allowed: 1..65536"));
  const grpc::Status refused = call(*stub, &v1::Control::Stub::ReloadConfig, {}, response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_message(), "limits.max_sessions is \"0\"; allowed: 1..65536");
}

}  // namespace
}  // namespace epd::control
