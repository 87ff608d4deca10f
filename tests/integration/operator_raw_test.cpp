// Requests that a gRPC tool other than epctl may send to a real daemon: epctl's own checks protect nobody.
#include "support/daemon.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <chrono>
#include <memory>
#include <string>
#include "epd/v1/control.grpc.pb.h"

namespace epd::test {
namespace {

class OperatorRaw : public testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.devices = 1;
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
    stub_ = v1::Control::NewStub(
        grpc::CreateChannel("unix:" + daemon_->control(), grpc::InsecureChannelCredentials()));
  }
  void TearDown() override { daemon_->stop(); }

  template <typename Request, typename Response>
  void expect_refused(grpc::Status (v1::Control::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                Response*),
                      const Request& request, grpc::StatusCode code, const std::string& says) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    Response response;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_NE(status.error_message().find(says), std::string::npos) << status.error_message();
  }

  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<v1::Control::Stub> stub_;
};

// It began a drain of 49 days, which no second drain could shorten.
TEST_F(OperatorRaw, ADrainOfMoreThanADayIsRefused) {
  v1::DrainRequest request;
  for (const std::uint32_t timeout_ms : {86'400'001u, ~0u}) {
    request.set_timeout_ms(timeout_ms);
    expect_refused(&v1::Control::Stub::Drain, request, grpc::StatusCode::INVALID_ARGUMENT,
                   "timeout_ms is " + std::to_string(timeout_ms) + "; allowed: 0..86400000");
  }
  EXPECT_NE(daemon_->epctl({"status"}).out.find("serving"), std::string::npos);
}

TEST_F(OperatorRaw, AReasonIsJudgedByTheDaemon) {
  v1::EvictSessionRequest session;
  session.set_session_id(1);
  session.set_reason("a\r\nb");
  expect_refused(&v1::Control::Stub::EvictSession, session, grpc::StatusCode::INVALID_ARGUMENT, "U+000D");
  session.set_reason(std::string("a\0b", 3));
  expect_refused(&v1::Control::Stub::EvictSession, session, grpc::StatusCode::INVALID_ARGUMENT, "U+0000");
  v1::EvictRankRequest rank;
  rank.set_reason("\x1b]0;title\x07");
  expect_refused(&v1::Control::Stub::EvictRank, rank, grpc::StatusCode::INVALID_ARGUMENT, "U+001B");
}

TEST_F(OperatorRaw, LongNamesAreRefusedWithWhatIsAllowed) {
  const std::string name(60'000, 'x');
  v1::SetDeviceRequest device;
  device.set_device(name);
  device.set_sms(1);
  expect_refused(&v1::Control::Stub::SetDevice, device, grpc::StatusCode::NOT_FOUND, "allowed: host:0");
  v1::RestartDeviceRequest restart;
  restart.set_device(name);
  expect_refused(&v1::Control::Stub::RestartDevice, restart, grpc::StatusCode::NOT_FOUND, "allowed: host:0");
  v1::SetGroupRequest group;
  group.set_group(name);
  group.set_sms(1);
  expect_refused(&v1::Control::Stub::SetGroup, group, grpc::StatusCode::NOT_FOUND,
                 "allowed: a name or an id");
}

}  // namespace
}  // namespace epd::test
