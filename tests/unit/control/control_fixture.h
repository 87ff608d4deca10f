// The control plane in process, over a real unix socket, with a supervisor made of fixed answers.
#pragma once

#include "control/control_server.h"
#include "proto/attach.h"
#include "support/fake_control_facade.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include "epd/v1/control.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace epd::control {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using std::chrono::seconds;

// Only so that a hang ends; far above what anything here takes.
inline constexpr seconds kHang(20);

inline void limit(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + kHang);
}

class ControlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/epd-control-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
    options_.socket_path = directory_ + "/control.sock";
  }
  void TearDown() override {
    server_.reset();
    ::unlink(options_.socket_path.c_str());
    EXPECT_EQ(::rmdir(directory_.c_str()), 0);
  }
  void start() {
    auto server = ControlServer::start(facade_, options_);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    server_ = std::move(server).value();
    channel_ = connect();
  }
  std::shared_ptr<grpc::Channel> connect() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("unix:" + options_.socket_path, grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  std::unique_ptr<v1::Control::Stub> control() { return v1::Control::NewStub(channel_); }

  struct Checked {
    grpc::Status status;
    HealthCheckResponse::ServingStatus health;
  };
  Checked check(const std::string& service) {
    grpc::ClientContext context;
    limit(context);
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    const auto status = grpc::health::v1::Health::NewStub(channel_)->Check(&context, request, &response);
    return {status, response.status()};
  }

  std::string directory_;
  ControlOptions options_;
  test::FakeControlFacade facade_;
  std::unique_ptr<ControlServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

template <typename Stub, typename Request, typename Response>
grpc::Status call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response& response) {
  grpc::ClientContext context;
  limit(context);
  return (stub.*method)(&context, request, &response);
}

}  // namespace epd::control
